"""One contract, three stores: memory, TCP, and a real etcd of three members."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import Cluster, cluster, require_etcd

from hotswap.errors import AuthError, UsageError
from hotswap.store.memory import MemoryStore
from hotswap.store.open import configured, open_store
from hotswap.store.port import ABSENT, Put, Store, StoreUnavailable
from hotswap.store.server import StoreServer
from hotswap.store.table import Table
from hotswap.store.tcp import TcpStore

TOKEN = "0123456789abcdef0123456789abcdef"
TIMEOUT_S = 5.0
TTL_S = 2.0
"""The shortest that etcd grants."""
Test = Callable[[Store, Store], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_etcd()
    with cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@contextlib.asynccontextmanager
async def tcp_server(path: Path | None, port: int = 0) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        serving = asyncio.create_task(StoreServer(TOKEN, path).serve(listener))
        try:
            yield listener.getsockname()[1]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture(params=["memory", "tcp", pytest.param("etcd", marks=pytest.mark.etcd)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    """Runs a test with two clients of one store."""
    kind: str = request.param
    members = request.getfixturevalue("etcd").url if kind == "etcd" else ""

    async def run(test: Test) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if kind == "memory":
                table = Table()
                clients: list[Any] = [MemoryStore(table), MemoryStore(table)]
            elif kind == "tcp":
                port = await stack.enter_async_context(tcp_server(tmp_path / "store.json"))
                clients = [TcpStore("127.0.0.1", port, TOKEN, TIMEOUT_S) for _ in range(2)]
            else:
                clients = [open_store(configured(members), TOKEN, TIMEOUT_S) for _ in range(2)]
            for client in clients:
                stack.push_async_callback(client.close)
            await test(*clients)

    return lambda test: asyncio.run(run(test))


def key(name: str) -> str:
    return f"/hotswap-test/{uuid.uuid4().hex}/{name}"


def test_what_one_has_written_the_other_reads(both: Callable[[Test], None]) -> None:
    async def test(one: Store, other: Store) -> None:
        name = key("a")
        assert await other.get(name) is None
        revision = await one.commit({}, [Put(key=name, value=b"\x00first\xff")])
        entry = await other.get(name)
        assert revision is not None and entry is not None
        assert (entry.value, entry.revision) == (b"\x00first\xff", revision)
        later = await other.commit({}, [Put(key=name, value=b"")])
        assert later is not None and later > revision
        entry = await one.get(name)
        assert entry is not None and (entry.value, entry.revision) == (b"", later)

    both(test)


def test_a_guard_that_does_not_hold_lets_nothing_through(both: Callable[[Test], None]) -> None:
    async def test(one: Store, other: Store) -> None:
        a, b = key("a"), key("b")
        first = await one.commit({a: ABSENT}, [Put(key=a, value=b"1")])
        assert first is not None
        assert await other.commit({a: ABSENT}, [Put(key=a, value=b"2"), Put(key=b, value=b"2")]) is None
        assert await other.get(b) is None
        second = await other.commit({a: first, b: ABSENT}, [Put(key=a, value=b"3"), Put(key=b, value=b"3")])
        assert second is not None
        assert await one.commit({a: first}, [Put(key=a, value=b"4")]) is None
        assert [entry.value for name in (a, b) if (entry := await one.get(name))] == [b"3", b"3"]

    both(test)


def test_of_many_who_want_a_key_one_gets_it(both: Callable[[Test], None]) -> None:
    async def test(one: Store, other: Store) -> None:
        name = key("a")
        wishes = [
            client.commit({name: ABSENT}, [Put(key=name, value=str(number).encode())])
            for number, client in enumerate([one, other] * 4)
        ]
        got = await asyncio.gather(*wishes)
        winners = [number for number, revision in enumerate(got) if revision is not None]
        entry = await one.get(name)
        assert len(winners) == 1 and entry is not None and entry.value == str(winners[0]).encode()

    both(test)


def test_a_lease_that_is_kept_stays_and_one_that_is_not_takes_its_keys_along(both: Callable[[Test], None]) -> None:
    async def test(one: Store, other: Store) -> None:
        kept, left, stays = key("kept"), key("left"), key("stays")
        grants = [await one.grant(TTL_S) for _ in range(2)]
        assert all(grant.ttl_s >= TTL_S for grant in grants)
        for name, lease in ((kept, grants[0].lease), (left, grants[1].lease), (stays, 0)):
            assert await one.commit({}, [Put(key=name, value=b"x", lease=lease)]) is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + 3 * grants[1].ttl_s + 5
        began, gone_at = loop.time(), None
        while gone_at is None:
            assert loop.time() < end, "the lease does not end"
            assert await one.keep(grants[0].lease) > 0
            if await other.get(left) is None:
                gone_at = loop.time()
            await asyncio.sleep(0.1)
        assert gone_at - began > TTL_S - 0.2, "the lease has ended too early"
        assert await one.keep(grants[1].lease) == 0.0
        assert await other.get(kept) is not None and await other.get(stays) is not None
        assert await one.commit({}, [Put(key=left, value=b"late", lease=grants[1].lease)]) is None
        assert await other.get(left) is None

    both(test)


def test_a_lease_that_is_given_up_ends_at_once(both: Callable[[Test], None]) -> None:
    async def test(one: Store, other: Store) -> None:
        name = key("a")
        grant = await one.grant(60.0)
        first = await one.commit({name: ABSENT}, [Put(key=name, value=b"x", lease=grant.lease)])
        assert first is not None
        await one.revoke(grant.lease)
        await one.revoke(grant.lease)
        assert await other.get(name) is None
        assert await one.keep(grant.lease) == 0.0
        # What was guarded by the old key can't be written any more, also when somebody else has taken it.
        again = await other.commit({name: ABSENT}, [Put(key=name, value=b"y")])
        assert again is not None and again > first
        assert await one.commit({name: first}, [Put(key=key("b"), value=b"late")]) is None

    both(test)


# --- what only one of them has --------------------------------------------------------------------------------------------


def test_a_tcp_store_goes_on_after_a_crash(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "store.json"
        async with tcp_server(path) as port:
            store = TcpStore("127.0.0.1", port, TOKEN, TIMEOUT_S)
            grant = await store.grant(TTL_S)
            revision = await store.commit({}, [Put(key="a", value=b"\xff", lease=grant.lease), Put(key="b", value=b"")])
        with pytest.raises(StoreUnavailable, match=rf"127\.0\.0\.1:{port}"):
            await store.get("a")
        async with tcp_server(path, port):
            assert [(e.value, e.revision) for k in "ab" if (e := await store.get(k))] == [
                (b"\xff", revision),
                (b"", revision),
            ]
            assert await store.keep(grant.lease) == TTL_S
            assert (await store.grant(TTL_S)).lease != grant.lease
            await asyncio.sleep(TTL_S + 0.1)
            assert await store.get("a") is None and await store.get("b") is not None
            await store.close()

    asyncio.run(test())
    assert (tmp_path / "store.json").stat().st_mode & 0o777 == 0o600


def test_a_tcp_store_listens_only_to_those_who_know_the_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with tcp_server(tmp_path / "store.json") as port:
            stranger = TcpStore("127.0.0.1", port, TOKEN[::-1], TIMEOUT_S)
            with pytest.raises(AuthError):
                await stranger.get("a")
            await stranger.close()
            # A connection of another kind is none of the store's either, whatever it knows.
            from hotswap.store.requests import store_codec
            from hotswap.wire.handshake import open_link

            with pytest.raises(AuthError):
                await open_link("127.0.0.1", port, store_codec(), TOKEN, TIMEOUT_S)

    asyncio.run(test())


def test_a_full_disk_is_not_answered_as_if_it_had_been_written(tmp_path: Path) -> None:
    async def test() -> None:
        folder = tmp_path / "gone"
        folder.mkdir()
        async with tcp_server(folder / "store.json") as port:
            store = TcpStore("127.0.0.1", port, TOKEN, TIMEOUT_S)
            assert await store.commit({}, [Put(key="a", value=b"1")]) is not None
            (folder / "store.json").unlink()
            folder.rmdir()
            with pytest.raises(StoreUnavailable):
                await store.commit({}, [Put(key="a", value=b"2")])
            with pytest.raises(StoreUnavailable):
                await store.get("a")
            folder.mkdir()
            entry = await store.get("a")
            assert entry is not None
            await store.close()

    asyncio.run(test())


def test_a_file_that_is_no_stores_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a store's"):
        StoreServer(TOKEN, tmp_path / "store.json")


@pytest.mark.parametrize(
    "url", ["", "etcd", "http://a:1", "etcd://", "etcd://a,,b", "etcd://user:secret@a:1", "tcp://a", "tcp://a:1,b:1"]
)
def test_an_address_that_makes_no_sense_is_refused_and_no_password_is_shown(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        configured(url)
    assert "secret" not in str(caught.value)


def test_what_belongs_together_is_asked_for() -> None:
    assert configured("etcds://a:1,b:2", ca="x").urls == ("https://a:1", "https://b:2")
    for wrong in ({"cert": "x"}, {"user": "x"}, {"password": "x"}):
        with pytest.raises(UsageError):
            configured("etcds://a:1", **wrong)
    with pytest.raises(UsageError, match="etcds"):
        configured("etcd://a:1", ca="x")
    assert "hidden" not in repr(configured("etcd://a:1", user="u", password="hidden"))
