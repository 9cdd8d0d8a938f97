"""Whatever comes over a connection is a message, or refused with the documented error: no crash, no hang, no large allocation."""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core import messages as m
from hotswap.errors import AuthError, HotswapError, ProtocolError
from hotswap.wire import worker_messages as w
from hotswap.wire.auth import CHALLENGE_BYTES, HELLO_BYTES, MAGIC, PROOF_BYTES, Acceptor, Initiator
from hotswap.wire.channels import control_codec, worker_codec
from hotswap.wire.frames import FRAME_BYTES_MAX, MAC_BYTES, FrameReader, FrameWriter
from hotswap.wire.handshake import accept_link, open_link
from hotswap.wire.links import AsyncLink

TOKEN = "0123456789abcdef0123456789abcdef"
KEY = b"k" * 32
CONTROL = [*get_args(m.FromAgent), *get_args(m.AsideMessage), *get_args(m.ToAgent)]
WORKER = [*get_args(w.FromWorker), *get_args(w.ToWorker)]
CHANNELS = [(control_codec(), CONTROL), (worker_codec(), WORKER)]
INTS = st.integers(-(2**63), 2**64 - 1)
ALLOCATED_MAX = 4 << 20
st.register_type_strategy(int, INTS)
st.register_type_strategy(float, st.floats(allow_nan=False))


@contextmanager
def modest(limit: int = ALLOCATED_MAX) -> Iterator[None]:
    """What is done allocates little."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes"


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Good bytes with flipped, lost or inserted ones."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if how == "flip" and at < len(data):
            data[at] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "drop":
            del data[at : at + draw(st.integers(1, 8))]
    return bytes(data)


@st.composite
def a_message(draw: st.DrawFn) -> tuple[Any, Any]:
    codec, kinds = draw(st.sampled_from(CHANNELS))
    return codec, draw(st.from_type(draw(st.sampled_from(kinds))))


# --- messages --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(a_message())
def test_every_message_comes_out_as_it_went_in(one: tuple[Any, Any]) -> None:
    codec, message = one
    try:
        decoded = codec.decode(codec.encode(message))
    except (ProtocolError, AssertionError):
        return  # What its own type refuses, as a membership with a node twice.
    assert decoded == message


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_message_is_a_message_or_refused(data: st.DataObject) -> None:
    codec, message = data.draw(a_message())
    encoded = data.draw(damaged(st.just(codec.encode(message))))
    with suppress(ProtocolError):
        assert type(codec.decode(encoded)).__name__ in {kind.__name__ for kind in [*CONTROL, *WORKER]}


@pytest.mark.parametrize("codec", [codec for codec, _ in CHANNELS], ids=["control", "worker"])
@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,  # nested without end
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # four thousand million items, of which none comes
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
        b"\xc1",
    ],
    ids=["arrays", "maps", "array", "map", "text", "bytes", "nothing", "reserved"],
)
def test_a_bomb_is_refused_at_once(codec: Any, body: bytes) -> None:
    name = b"\xa9Heartbeat" if codec is CHANNELS[0][0] else b"\xa5Built"
    for data in (body, b"\x93\x01" + name + body):
        began = time.monotonic()
        with modest(), pytest.raises(ProtocolError):
            codec.decode(data)
        assert time.monotonic() - began < 2.0


# --- frames ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=10),
    st.sampled_from([None, KEY]),
    st.lists(st.binary(max_size=60), max_size=3),
)
def test_any_stream_is_frames_or_refused(pieces: list[bytes], key: bytes | None, payloads: list[bytes]) -> None:
    reader, writer = FrameReader(key), FrameWriter(key)
    good = [writer.frame(payload) for payload in payloads]
    with suppress(ProtocolError):
        assert [payload for frame in good for payload in reader.feed(frame)] == payloads
        found = [payload for piece in pieces for payload in reader.feed(piece)]
        assert key is None or not found, "an authentic frame out of nothing"


@given(st.integers(FRAME_BYTES_MAX + 1, 2**32 - 1), st.sampled_from([None, KEY]))
def test_the_length_alone_is_enough_to_refuse_a_frame(length: int, key: bytes | None) -> None:
    with modest(), pytest.raises(ProtocolError, match="limit"):
        list(FrameReader(key).feed(length.to_bytes(4, "big")))


def test_an_announced_frame_is_not_given_memory_before_it_comes() -> None:
    with modest():
        reader = FrameReader(KEY)
        assert list(reader.feed(FRAME_BYTES_MAX.to_bytes(4, "big") + b"x" * MAC_BYTES)) == []


# --- handshake -------------------------------------------------------------------------------------------------------


@given(damaged(st.just(Initiator(TOKEN, "control").hello())))
def test_a_damaged_hello_is_refused_or_proves_nothing(hello: bytes) -> None:
    acceptor = Acceptor(TOKEN, "control")
    try:
        acceptor.challenge(hello)
    except ProtocolError:
        return
    assert hello.startswith(MAGIC) and len(hello) == HELLO_BYTES
    with pytest.raises(AuthError):
        acceptor.verify(bytes(PROOF_BYTES))


@given(st.one_of(st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES), st.binary(max_size=200)))
def test_no_challenge_but_the_right_one_is_answered(challenge: bytes) -> None:
    with pytest.raises(ProtocolError):
        Initiator(TOKEN, "control").prove(challenge)


@given(st.one_of(st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES), st.binary(max_size=200)))
def test_no_proof_but_the_right_one_is_accepted(proof: bytes) -> None:
    acceptor = Acceptor(TOKEN, "control")
    acceptor.challenge(Initiator(TOKEN, "control").hello())
    with pytest.raises(AuthError):
        acceptor.verify(proof)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=400), st.booleans())
def test_a_stranger_is_refused_in_time_whatever_it_says(said: bytes, hangs_up: bool) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said)
            if hangs_up:
                theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(HotswapError):
                await accept_link(ours, control_codec(), TOKEN, 0.05)

    asyncio.run(asyncio.wait_for(scenario(), 10))


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=200))
def test_an_agent_proves_nothing_to_who_cannot_prove_himself(said: bytes) -> None:
    async def scenario() -> bytes:
        heard = b""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal heard
            writer.write(said)
            heard = await reader.read(10_000)
            with suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(HotswapError):
            await open_link("127.0.0.1", port, control_codec(), TOKEN, 0.2)
        server.close()
        await server.wait_closed()
        return heard

    heard = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert len(heard) <= HELLO_BYTES and TOKEN.encode() not in heard


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_an_authenticated_link_yields_messages_or_ends(payloads: list[bytes]) -> None:
    """Even a peer that knows the token cannot make the receiver fail otherwise."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        link: AsyncLink[Any] = AsyncLink(ours, control_codec(), receive_key=KEY)
        with theirs:
            writer = FrameWriter(KEY)
            theirs.sendall(b"".join(writer.frame(payload) for payload in payloads))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(HotswapError):
                while True:
                    await link.receive()
            link.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 10))
