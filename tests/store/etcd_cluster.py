"""A real etcd of three members on loopback, of which a test may stop, freeze or cut off some."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

START_S = 20.0
MEMBERS = ("m0", "m1", "m2")


def require_etcd() -> None:
    """Skip, with the reason, where there is no etcd."""
    pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'hotswap[etcd]'")
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here (Debian: apt-get install etcd-server)")


class Member:
    def __init__(self, name: str, directory: Path, command: Sequence[str], client_url: str) -> None:
        self.name = name
        self.url = client_url
        self._command = list(command)
        self._log = directory / f"{name}.log"
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def restart(self) -> None:
        self.process = self._spawn()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError, KeyError):
            return False

    def is_leader(self) -> bool:
        request = urllib.request.Request(f"{self.url}/v3/maintenance/status", data=b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=2) as answer:
            said = json.load(answer)
        return bool(said.get("leader") == said["header"]["member_id"])

    def tail(self) -> str:
        return f"--- {self._log}\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])


class Cluster:
    """*addresses* and *prefixes*: where each member listens, and what its command begins with (a network namespace)."""

    def __init__(
        self,
        directory: Path,
        addresses: Mapping[str, str] | None = None,
        prefixes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        hosts = addresses or dict.fromkeys(MEMBERS, "127.0.0.1")
        ports = {name: (2379, 2380) if addresses else (free_port(), free_port()) for name in hosts}
        peers = {name: f"http://{host}:{ports[name][1]}" for name, host in hosts.items()}
        self.members: dict[str, Member] = {}
        for name, host in hosts.items():
            client = f"http://{host}:{ports[name][0]}"
            command = [
                *(prefixes or {}).get(name, ()),
                *("etcd", "--name", name, "--data-dir", str(directory / name)),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peers[name], "--initial-advertise-peer-urls", peers[name]),
                *("--initial-cluster", ",".join(f"{other}={url}" for other, url in peers.items())),
                *("--initial-cluster-state", "new"),
            ]
            self.members[name] = Member(name, directory, command, client)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.url.removeprefix("http://") for member in self.members.values())

    def wait(self, is_healthy: Callable[[str, str], bool] | None = None) -> None:
        """*is_healthy*: of a member with that name and address, which cannot be reached from here."""
        end = time.monotonic() + START_S
        while not all(
            member.is_healthy() if is_healthy is None else is_healthy(member.name, member.url)
            for member in self.members.values()
        ):
            if time.monotonic() > end:
                raise AssertionError("etcd did not start\n" + "\n".join(m.tail() for m in self.members.values()))
            time.sleep(0.05)

    def leader(self) -> Member:
        return next(member for member in self.members.values() if member.is_leader())

    def close(self) -> None:
        for member in self.members.values():
            with contextlib.suppress(ProcessLookupError):
                member.signal(signal.SIGCONT)
            member.kill()


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    made = Cluster(directory)
    try:
        made.wait()
        yield made
    finally:
        made.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
