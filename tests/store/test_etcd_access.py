"""etcd as it is run in earnest: TLS, a user with a password and a role, tokens that a restarted member has forgotten."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import START_S, free_port, require_etcd

from hotswap.errors import UsageError
from hotswap.store.open import configured, open_store
from hotswap.store.port import Put, StoreUnavailable

pytestmark = pytest.mark.etcd
PASSWORD, TIMEOUT_S = "a password of etcd", 5.0


class Locked:
    """One member behind TLS that asks everybody who they are."""

    def __init__(self, directory: Path) -> None:
        self.ca = str(directory / "ca.crt")
        key = str(directory / "ca.key")
        subject = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", key, "-out", self.ca, "-days", "2"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files]
        subprocess.run(command, check=True, capture_output=True)
        self.port = free_port()
        self.url, peer = f"https://127.0.0.1:{self.port}", f"http://127.0.0.1:{free_port()}"
        self._command = [
            *("etcd", "--name", "m0", "--data-dir", str(directory / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--cert-file", self.ca, "--key-file", key, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"m0={peer}"),
        ]
        self._log = directory / "etcd.log"
        self.start()
        self._require_passwords()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            try:
                self._post("/v3/maintenance/status", {})
                return
            except OSError:
                assert time.monotonic() < end, self._log.read_text()[-2000:]
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _require_passwords(self) -> None:
        start, end = (base64.b64encode(text).decode() for text in (b"/hotswap/", b"/hotswap0"))
        grant = {"permType": "READWRITE", "key": start, "range_end": end}
        for path, body in (
            ("user/add", {"name": "root", "password": "another one"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "hotswap"}),
            ("role/grant", {"name": "hotswap", "perm": grant}),
            ("user/add", {"name": "job", "password": PASSWORD}),
            ("user/grant", {"user": "job", "role": "hotswap"}),
            ("enable", {}),
        ):
            self._post(f"/v3/auth/{path}", body)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode(), method="POST")
        context = ssl.create_default_context(cafile=self.ca)
        with urllib.request.urlopen(request, timeout=2, context=context) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    require_etcd()
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate with")
    made = Locked(tmp_path_factory.mktemp("locked"))
    yield made
    made.kill()


def use(locked: Locked, *, ca: str = "", user: str = "job", password: str = PASSWORD, key: str = "/hotswap/x") -> None:
    async def run() -> None:
        address = f"etcds://127.0.0.1:{locked.port}"
        store = open_store(configured(address, ca=ca or locked.ca, user=user, password=password), "", TIMEOUT_S)
        try:
            grant = await store.grant(60.0)
            assert await store.commit({}, [Put(key=key, value=b"1", lease=grant.lease)]) is not None
            assert await store.keep(grant.lease) > 0
            await store.revoke(grant.lease)
            assert await store.get(key) is None
        finally:
            await store.close()

    asyncio.run(run())


def test_a_user_with_the_role_that_the_manual_asks_for_can_do_all_that_is_needed(locked: Locked) -> None:
    use(locked)


@pytest.mark.parametrize("wrong", [{"password": "wrong"}, {"user": "nobody"}, {"key": "/elsewhere"}], ids=str)
def test_what_etcd_refuses_is_the_users_to_put_right(locked: Locked, wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="etcd refuses") as caught:
        use(locked, **wrong)
    assert PASSWORD not in str(caught.value)


def test_a_member_with_another_certificate_is_not_spoken_to(locked: Locked, tmp_path: Path) -> None:
    other = tmp_path / "other.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other", "-out", str(other)]
    subprocess.run([*command, "-keyout", str(tmp_path / "key")], check=True, capture_output=True)
    with pytest.raises(StoreUnavailable, match="certificate"):
        use(locked, ca=str(other))


def test_a_member_that_was_started_again_is_asked_for_another_token(locked: Locked) -> None:
    async def run() -> None:
        address = f"etcds://127.0.0.1:{locked.port}"
        store = open_store(configured(address, ca=locked.ca, user="job", password=PASSWORD), "", TIMEOUT_S)
        try:
            assert await store.commit({}, [Put(key="/hotswap/y", value=b"1")]) is not None
            locked.kill()
            locked.start()
            entry = await store.get("/hotswap/y")
            assert entry is not None and entry.value == b"1"
        finally:
            await store.close()

    asyncio.run(run())
