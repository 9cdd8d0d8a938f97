"""Frames and messages: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core import messages as m
from hotswap.core.keep import GroupState
from hotswap.core.types import Endpoint, Held, HeldKind, Source, SourceKind, WorkerState
from hotswap.errors import AuthError, ProtocolError
from hotswap.wire.channels import control_codec, worker_codec
from hotswap.wire.codec import VERSION
from hotswap.wire.frames import FRAME_BYTES_MAX, FrameReader, FrameWriter

KEY = b"k" * 32


def messages() -> list[object]:
    held = Held(slot=1, step=7, kind=HeldKind.REPLICA, unique_nbytes=3)
    worker = WorkerState(slot=1, step=7, dirty=True, torn=False)
    groups = {1: {"tp": GroupState(members=(0, 1), issued=4, intact=True)}}
    source = Source(kind=SourceKind.REPLICA, unique_from="b#1", unique_nbytes=9)
    return [
        m.Register(node="a#1", fault_domain="r1", endpoint=Endpoint(host="127.0.0.1", port=9), acked={3: 4}),
        m.NodeFenced(generation=2, held=(held,), workers=(worker,), groups=groups, checkpoint_step=None),
        m.Plan(
            generation=2, resume_step=7, sources={1: source}, holders={1: ("b#1",)}, push={1: ("b#1",)}, keep=("tp",)
        ),
        m.KvSet(generation=2, key="k", value=b"\x00\xff"),
    ]


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: object) -> None:
    assert control_codec().decode(control_codec().encode(message)) == message


def test_a_message_of_another_channel_is_refused() -> None:
    data = control_codec().encode(m.Heartbeat(generation=1))
    with pytest.raises(ProtocolError, match="does not belong on this channel"):
        worker_codec().decode(data)


def test_another_version_is_refused_with_what_to_do() -> None:
    data = msgspec.msgpack.encode((VERSION + 1, "Heartbeat", {"generation": 1}))
    with pytest.raises(ProtocolError, match="same hotswap on all nodes"):
        control_codec().decode(data)


@pytest.mark.parametrize("body", [{}, {"generation": "one"}, {"generation": 1, "acked": {"x": 1}}, [1]])
def test_wrongly_typed_bodies_are_refused(body: object) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        control_codec().decode(msgspec.msgpack.encode((VERSION, "Heartbeat", body)))


@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoder_fail_otherwise(data: bytes) -> None:
    try:
        control_codec().decode(data)
    except ProtocolError:
        return


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50), st.sampled_from([None, KEY]))
def test_payloads_come_out_whole_however_they_are_cut(payloads: list[bytes], cut: int, key: bytes | None) -> None:
    writer, reader = FrameWriter(key), FrameReader(key)
    stream = b"".join(writer.frame(payload) for payload in payloads)
    found: list[bytes] = []
    for start in range(0, len(stream), cut):
        found.extend(reader.feed(stream[start : start + cut]))
    assert found == payloads


@given(st.integers(0, 39), st.integers(1, 255))
def test_an_altered_frame_never_gets_through(position: int, flip: int) -> None:
    frame = bytearray(FrameWriter(KEY).frame(b"x" * 20))
    frame[position] ^= flip
    reader = FrameReader(KEY)
    try:
        assert list(reader.feed(bytes(frame))) == []  # a longer length waits for more bytes
    except (AuthError, ProtocolError):
        return


def test_frames_cannot_be_replayed_or_reordered() -> None:
    writer = FrameWriter(KEY)
    first, second = writer.frame(b"first"), writer.frame(b"second")
    with pytest.raises(AuthError):
        list(FrameReader(KEY).feed(second))
    with pytest.raises(AuthError):
        list(FrameReader(KEY).feed(first + first))


def test_oversize_frames_are_refused_before_they_are_buffered() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        list(FrameReader(None).feed((FRAME_BYTES_MAX + 1).to_bytes(4, "big")))
