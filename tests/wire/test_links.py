"""Links over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest

from hotswap.core import messages as m
from hotswap.errors import AuthError, HotswapError, PeerUnreachable, ProtocolError
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import control_codec, worker_codec
from hotswap.wire.handshake import accept_link, open_link
from hotswap.wire.links import AsyncLink, WorkerLink

TOKEN = "0123456789abcdef0123456789abcdef"
TIMEOUT_S = 5.0


async def serve_one(listener: socket.socket, token: str = TOKEN) -> AsyncLink[object]:
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    try:
        return await accept_link(sock, control_codec(), token, TIMEOUT_S)
    except BaseException:
        sock.close()
        raise


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


async def connected(listener: socket.socket) -> tuple[AsyncLink[object], AsyncLink[object]]:
    port = listener.getsockname()[1]
    theirs, ours = await asyncio.gather(
        serve_one(listener), open_link("127.0.0.1", port, control_codec(), TOKEN, TIMEOUT_S)
    )
    return ours, theirs


def test_messages_cross_both_ways_in_order() -> None:
    async def scenario() -> None:
        with listening() as listener:
            ours, theirs = await connected(listener)
            for generation in range(1, 400):
                ours.send(m.Heartbeat(generation=generation))
                theirs.send(m.Go(generation=generation))
            for generation in range(1, 400):
                assert await theirs.receive() == m.Heartbeat(generation=generation)
                assert await ours.receive() == m.Go(generation=generation)
            ours.close()
            with pytest.raises(PeerUnreachable):
                await theirs.receive()
            with pytest.raises(PeerUnreachable):
                await ours.receive()

    asyncio.run(scenario())


def test_a_wrong_token_is_told_apart_from_a_dead_peer() -> None:
    async def scenario() -> None:
        with listening() as listener:
            port = listener.getsockname()[1]
            ours = open_link("127.0.0.1", port, control_codec(), "another token, also long enough", TIMEOUT_S)
            results = await asyncio.gather(serve_one(listener), ours, return_exceptions=True)
        assert isinstance(results[0], HotswapError)
        assert isinstance(results[1], AuthError)

    asyncio.run(scenario())


def test_nobody_there_is_reported_at_once() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerUnreachable, match="cannot be reached"):
        asyncio.run(open_link("127.0.0.1", port, control_codec(), TOKEN, TIMEOUT_S))


def test_a_silent_peer_meets_the_deadline() -> None:
    async def scenario() -> None:
        with listening() as listener:
            await open_link("127.0.0.1", listener.getsockname()[1], control_codec(), TOKEN, 0.2)

    with pytest.raises(PeerUnreachable, match="no answer in time"):
        asyncio.run(scenario())


def test_bytes_after_the_handshake_must_be_genuine() -> None:
    async def scenario() -> None:
        with listening() as listener:
            ours, theirs = await connected(listener)
            await asyncio.get_running_loop().sock_sendall(ours._sock, b"\0\0\0\1x" + b"\0" * 16)
            with pytest.raises(ProtocolError):
                await theirs.receive()
            ours.close()
            theirs.close()

    asyncio.run(scenario())


def test_descriptors_travel_with_their_message() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerLink(theirs, worker_codec())
    received: list[object] = []

    def listen() -> None:
        received.extend(worker.receive() for _ in range(2))

    listener = threading.Thread(target=listen)
    listener.start()
    fd = os.memfd_create("test")
    os.write(fd, b"hello")

    async def scenario() -> None:
        link: AsyncLink[object] = AsyncLink(ours, worker_codec())
        link.send(w.Granted(nbytes=5, buffers=1, free=0), fds=[fd])
        link.send(m.Go(generation=1))
        await link.flush(TIMEOUT_S)
        await asyncio.get_running_loop().run_in_executor(None, listener.join, TIMEOUT_S)
        link.close()

    asyncio.run(scenario())
    assert received == [w.Granted(nbytes=5, buffers=1, free=0), m.Go(generation=1)]
    passed = worker.fds.popleft()
    assert os.pread(passed, 5, 0) == b"hello"
    os.close(passed)
    os.close(fd)
    worker.close()


def test_a_worker_hears_that_its_agent_is_gone() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerLink(theirs, worker_codec())
    ours.close()
    with pytest.raises(PeerUnreachable, match="agent is gone"):
        worker.receive()
    with pytest.raises(PeerUnreachable, match="agent is gone"):
        worker.send(w.Connected(generation=1))
    worker.close()


def test_flush_waits_for_the_last_byte() -> None:
    """What the sender has taken off its queue but the kernel has not taken yet counts as well."""
    nbytes = 8 * 1024 * 1024

    async def scenario() -> None:
        with listening() as listener:
            ours, theirs = await connected(listener)
            ours.send(m.KvSet(generation=1, key="large", value=b"x" * nbytes))
            reading = asyncio.create_task(theirs.receive())
            await ours.flush(TIMEOUT_S)
            ours.close()
            received = await reading
            assert isinstance(received, m.KvSet) and len(received.value) == nbytes
            theirs.close()

    asyncio.run(scenario())


def test_flush_gives_up_on_a_peer_that_does_not_read() -> None:
    async def scenario() -> None:
        with listening() as listener:
            ours, theirs = await connected(listener)
            ours.send(m.KvSet(generation=1, key="large", value=b"x" * (16 * 1024 * 1024)))
            began = asyncio.get_running_loop().time()
            await ours.flush(0.2)
            assert 0.1 < asyncio.get_running_loop().time() - began < 2
            ours.close()
            theirs.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("state", ["idle", "receiving", "sending", "ended by the peer"])
def test_a_closed_link_keeps_no_descriptor(state: str) -> None:
    async def scenario() -> None:
        with listening() as listener:
            ours, theirs = await connected(listener)
            reading = asyncio.create_task(ours.receive()) if state == "receiving" else None
            if state == "sending":
                ours.send(m.KvSet(generation=1, key="large", value=b"x" * (16 * 1024 * 1024)))
            await asyncio.sleep(0.01)
            if state == "ended by the peer":
                theirs.close()
                with pytest.raises(PeerUnreachable):
                    await ours.receive()
            ours.close()
            theirs.close()
            await asyncio.sleep(0.01)
            if reading is not None:
                with pytest.raises(PeerUnreachable):
                    await reading
            assert ours._sock.fileno() == -1
            assert theirs._sock.fileno() == -1
            with pytest.raises(PeerUnreachable):
                await ours.receive()

    asyncio.run(scenario())
