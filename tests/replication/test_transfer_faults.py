"""Killed senders, damaged streams, strangers and nonsense: none of it may become state that somebody restores."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from replication_kit import (
    LIMITS,
    TOKEN,
    Proxy,
    Site,
    complete,
    content,
    cut,
    eventually,
    flip,
    held,
    once,
    replicas,
    section,
)

from hotswap.core.types import HeldKind
from hotswap.errors import AuthError, HotswapError, IntegrityError, PeerUnreachable, ProtocolError
from hotswap.replication import channel, sections
from hotswap.replication.channel import (
    HEADER_BYTES_MAX,
    Commit,
    Connection,
    Deadline,
    End,
    Fetch,
    Offer,
    Part,
    Push,
    Ready,
    Received,
    Refused,
)
from hotswap.replication.sections import CHUNK_NBYTES, SectionId, SectionKind, checksums
from hotswap.replication.transfer import ServerLimits
from hotswap.wire.auth import CHALLENGE_BYTES, HELLO_BYTES, MAGIC, NONCE_BYTES, PROOF_BYTES

REPLICA, UNIQUE = HeldKind.REPLICA, SectionKind.UNIQUE
LARGE = 2 * CHUNK_NBYTES + 12_345
HANDSHAKE_UP = HELLO_BYTES + PROOF_BYTES
SOON = 2.0


@pytest.fixture
def owner() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.fixture
def holder() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.fixture(autouse=True)
def many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "PART_NBYTES_MIN", CHUNK_NBYTES)


def soon() -> Deadline:
    return Deadline(SOON, SOON)


def stored(site: Site, owner: int, step: int) -> bytes:
    with site.vault.open(owner, step, UNIQUE, REPLICA) as lease:
        return bytes(lease.view)


# --- processes that die ---


@contextlib.contextmanager
def sender(holder: Site, nbytes: int, after_nbytes: int, how: signal.Signals) -> Iterator[subprocess.Popen[bytes]]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *(part for part in sys.path if part)])
    arguments = [str(value) for value in (holder.server.port, nbytes, after_nbytes, int(how))]
    process = subprocess.Popen(
        [sys.executable, str(here / "die_in_push.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@pytest.mark.parametrize("nbytes", [1000, 3_000_000, LARGE])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_sender_killed_in_the_middle_leaves_the_version_before_and_no_half_one(
    holder: Site, nbytes: int, share: float
) -> None:
    with sender(holder, nbytes, int(share * nbytes), signal.SIGKILL) as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (-signal.SIGKILL, b"")
    eventually(lambda: holder.server.stats().connections == 0)
    assert held(holder.vault, REPLICA) == [(0, 1)]
    assert stored(holder, 0, 1) == content(0, 1, 1, 100 + nbytes)[100:]
    assert holder.server.stats().replicas == 1


def test_a_sender_that_is_stopped_is_given_up_and_comes_back_too_late() -> None:
    with (
        Site(limits=ServerLimits(progress_s=0.3)) as holder,
        sender(holder, LARGE, LARGE // 2, signal.SIGSTOP) as process,
    ):
        eventually(lambda: holder.server.stats().replicas == 1, 20)
        eventually(lambda: os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)[0] != 0, 20)
        eventually(lambda: holder.server.stats().transfers == 0)
        assert holder.vault.bytes_reserved <= 2 * LARGE
        holder.vault.fence(2)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(20) != 0
        assert held(holder.vault, REPLICA) == [(0, 1)]


def test_a_holder_that_goes_away_in_the_middle_is_unreachable(owner: Site) -> None:
    with Site() as holder:
        owner.client.on_chunk = lambda version, sent: holder.server.close()
        complete(owner.vault, section(unique=LARGE))
        with pytest.raises(PeerUnreachable):
            owner.client.push(holder.endpoint, owner.vault, section(unique=LARGE), deadline_s=5)
        assert replicas(holder.vault) == []


# --- streams that are damaged ---


def push_through(owner: Site, proxy: Proxy, version: SectionId) -> None:
    complete(owner.vault, version)
    owner.client.push(proxy.endpoint, owner.vault, version, deadline_s=5)


def stream_length(nbytes: int) -> int:
    """Length of what the sender of one small push writes."""
    with Site() as owner, Site() as holder, Proxy(holder.endpoint) as proxy:
        push_through(owner, proxy, section(unique=nbytes))
        return len(proxy.recorded[0])


STREAM = stream_length(300)


@pytest.mark.parametrize(
    "position", [*range(0, HANDSHAKE_UP + 120, 11), *range(HANDSHAKE_UP + 120, STREAM, 23), STREAM - 1]
)
def test_one_flipped_bit_anywhere_in_a_push_is_noticed(owner: Site, holder: Site, position: int) -> None:
    with Proxy(holder.endpoint, upward=flip(position)) as proxy, pytest.raises(HotswapError):
        push_through(owner, proxy, section(unique=300))
    assert holder.vault.inventory() == ()
    eventually(lambda: sum(holder.server.stats().refused.values()) >= 1)


def test_a_flipped_bit_in_the_bytes_is_an_integrity_error_and_a_second_push_works(owner: Site, holder: Site) -> None:
    with Proxy(holder.endpoint, upward=once(flip(STREAM - 150))) as proxy:
        with pytest.raises(IntegrityError, match=r"replica of slot 0 at step 1 .* in this test's memory"):
            push_through(owner, proxy, section(unique=300))
        assert holder.server.stats().refused == {"corrupt": 1}
        owner.client.push(proxy.endpoint, owner.vault, section(unique=300), deadline_s=5)
    assert held(holder.vault, REPLICA) == [(0, 1)]


def test_a_flipped_bit_in_one_part_of_a_large_push_is_noticed(owner: Site, holder: Site) -> None:
    with Proxy(holder.endpoint, upward=flip(1_000_000)) as proxy:
        with pytest.raises(HotswapError):
            push_through(owner, proxy, section(unique=LARGE))
        assert len(proxy.recorded) >= 2
    assert holder.vault.inventory() == ()
    assert holder.server.stats().refused["corrupt"] >= 1


def test_a_flipped_bit_in_an_answer_is_noticed(owner: Site, holder: Site) -> None:
    for position in range(CHALLENGE_BYTES, CHALLENGE_BYTES + 40, 3):
        with Proxy(holder.endpoint, downward=flip(position)) as proxy:
            version = section(owner=position, unique=300)
            with contextlib.suppress(HotswapError):
                push_through(owner, proxy, version)
                assert stored(holder, position, 1) == content(position, 1, 1, 400)[100:]
    for item in replicas(holder.vault):
        assert stored(holder, item.slot, 1) == content(item.slot, 1, 1, 400)[100:]


@pytest.mark.parametrize("nbytes", [300, LARGE])
def test_a_flipped_bit_in_what_is_fetched_is_noticed(owner: Site, holder: Site, nbytes: int) -> None:
    complete(holder.vault, section(unique=nbytes))
    into = memoryview(bytearray(nbytes))
    with Proxy(holder.endpoint, downward=flip(CHALLENGE_BYTES + 200)) as proxy, pytest.raises(IntegrityError):
        owner.client.fetch(proxy.endpoint, 0, 1, UNIQUE, into, deadline_s=5)


@pytest.mark.parametrize("position", [*range(1, STREAM, 37), STREAM - 1])
def test_a_push_that_breaks_off_anywhere_leaves_nothing(owner: Site, holder: Site, position: int) -> None:
    with Proxy(holder.endpoint, upward=cut(position)) as proxy, pytest.raises(PeerUnreachable):
        push_through(owner, proxy, section(unique=300))
    eventually(lambda: holder.server.stats().connections == 0)
    assert holder.vault.inventory() == ()


@pytest.mark.parametrize("position", [CHALLENGE_BYTES // 2, CHALLENGE_BYTES + 10, CHALLENGE_BYTES + 5000])
def test_a_fetch_that_breaks_off_is_unreachable(owner: Site, holder: Site, position: int) -> None:
    complete(holder.vault, section(unique=10_000))
    with Proxy(holder.endpoint, downward=cut(position)) as proxy, pytest.raises(PeerUnreachable):
        owner.client.fetch(proxy.endpoint, 0, 1, UNIQUE, memoryview(bytearray(10_000)), deadline_s=5)


def test_an_answer_that_is_lost_makes_the_owner_push_again_and_the_version_before_stays(
    owner: Site, holder: Site
) -> None:
    complete(owner.vault, section(step=1))
    owner.client.push(holder.endpoint, owner.vault, section(step=1), deadline_s=5)
    with Proxy(holder.endpoint, downward=cut(CHALLENGE_BYTES + 1)) as proxy, pytest.raises(PeerUnreachable):
        push_through(owner, proxy, section(step=2))
    assert held(holder.vault, REPLICA) == [(0, 1), (0, 2)]
    owner.client.push(holder.endpoint, owner.vault, section(step=2), deadline_s=5)
    assert held(holder.vault, REPLICA) == [(0, 1), (0, 2)]


def test_a_snapshot_that_its_worker_overwrites_during_the_push_is_refused(owner: Site, holder: Site) -> None:
    complete(owner.vault, section(unique=3_000_000))
    overwritten = owner.vault.find(0, 1)
    assert overwritten is not None
    owner.client.on_chunk = lambda version, sent: owner.vault.snapshot_begin(0, overwritten.buffer)
    with pytest.raises(IntegrityError, match="overwritten"):
        owner.client.push(holder.endpoint, owner.vault, section(unique=3_000_000), deadline_s=5)
    assert replicas(holder.vault) == []


# --- strangers ---


def test_a_recorded_session_is_worth_nothing(owner: Site, holder: Site) -> None:
    with Proxy(holder.endpoint) as proxy:
        push_through(owner, proxy, section())
        recording = bytes(proxy.recorded[0])
    holder.vault.forget(0)
    with socket.create_connection((holder.endpoint.host, holder.endpoint.port), timeout=SOON) as sock:
        sock.sendall(recording)
        received = read_to_end(sock)
    assert len(received) == CHALLENGE_BYTES
    eventually(lambda: holder.server.stats().refused == {"auth": 1})
    assert holder.vault.inventory() == ()


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
    return received


def test_a_repeated_or_reordered_message_ends_the_connection(holder: Site) -> None:
    connection = holder.raw()
    frame = connection._writer.frame(channel._CODEC.encode(FETCH))
    connection.send_raw(frame, soon())
    assert isinstance(connection.receive(soon()), Refused)
    connection.send_raw(frame, soon())
    with pytest.raises(PeerUnreachable):
        connection.receive(soon())
    connection.close()
    assert holder.server.stats().refused == {"not_held": 1, "auth": 1}


FETCH = Fetch(owner=0, step=1, kind=UNIQUE, section_nbytes=10, offset=0, nbytes=10)


@pytest.mark.parametrize(
    ("first_bytes", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + bytes(40), "malformed"),
        (MAGIC + bytes(NONCE_BYTES) + bytes(PROOF_BYTES), "auth"),
        (b"", "handshake"),
        (MAGIC, "handshake"),
    ],
)
def test_a_stranger_gets_nothing_and_is_counted(holder: Site, first_bytes: bytes, reason: str) -> None:
    with socket.create_connection((holder.endpoint.host, holder.endpoint.port), timeout=SOON) as sock:
        sock.sendall(first_bytes)
        # Who is no peer may have been hung up on already.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert len(read_to_end(sock)) in (0, CHALLENGE_BYTES)
    eventually(lambda: holder.server.stats().refused == {reason: 1})


def test_a_stranger_who_says_nothing_is_cut_off() -> None:
    with (
        Site(limits=ServerLimits(handshake_s=0.1)) as holder,
        socket.create_connection((holder.endpoint.host, holder.endpoint.port), timeout=SOON) as sock,
    ):
        assert read_to_end(sock) == b""
        eventually(lambda: holder.server.stats().refused == {"handshake": 1})


# --- nonsense from somebody who knows the token ---


@pytest.mark.parametrize("length", [HEADER_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_an_oversize_header_is_refused_before_it_is_read(holder: Site, length: int) -> None:
    connection = holder.raw()
    connection.send_raw(struct.pack("!I", length), soon())
    with pytest.raises(PeerUnreachable):
        connection.receive(soon())
    connection.close()
    assert holder.server.stats().refused == {"oversize": 1}


def test_an_oversize_answer_is_refused_by_the_asking_side(owner: Site, holder: Site) -> None:
    complete(holder.vault, section())
    huge = struct.pack("!I", 2**31)

    def downward(position: int, data: bytes) -> bytes:
        return data if position < CHALLENGE_BYTES else huge + data[len(huge) :]

    with Proxy(holder.endpoint, downward=downward) as proxy, pytest.raises(ProtocolError, match="header of 2147483648"):
        owner.client.fetch(proxy.endpoint, 0, 1, UNIQUE, memoryview(bytearray(1000)), deadline_s=5)


@pytest.mark.parametrize(
    "message",
    [
        Ready(transfer=1),
        End(checksums=()),
        Offer(section=section()),
        Received(offset=0),
        Push(section=section(unique=CHUNK_NBYTES + 1), inline=True),
    ],
)
def test_a_message_in_the_wrong_place_ends_the_connection(holder: Site, message: channel.Message) -> None:
    connection = holder.raw()
    connection.send(message, soon())
    with pytest.raises(PeerUnreachable):
        connection.receive(soon())
    connection.close()
    assert holder.server.stats().refused == {"malformed": 1}


def test_a_request_where_a_section_ends_is_refused(holder: Site) -> None:
    connection = holder.raw()
    connection.send(Push(section=section(unique=4), inline=True), soon())
    connection.send_raw(b"data", soon())
    connection.send(FETCH, soon())
    with pytest.raises(PeerUnreachable):
        connection.receive(soon())
    connection.close()
    assert holder.vault.inventory() == ()


def begin(holder: Site, nbytes: int = LARGE) -> tuple[Connection, int]:
    connection = holder.raw()
    connection.send(Push(section=section(unique=nbytes), inline=False), soon())
    ready = connection.receive(soon())
    assert isinstance(ready, Ready)
    return connection, ready.transfer


def send_part(connection: Connection, transfer_id: int, offset: int, data: bytes) -> channel.Message:
    connection.send(Part(transfer=transfer_id, offset=offset, nbytes=len(data)), soon())
    connection.send_raw(data, soon())
    connection.send(End(checksums=checksums(memoryview(data))), soon())
    return connection.receive(soon())


def test_parts_with_a_gap_are_not_a_replica(holder: Site) -> None:
    connection, number = begin(holder)
    assert isinstance(send_part(connection, number, CHUNK_NBYTES, bytes(CHUNK_NBYTES)), Received)
    connection.send(Commit(transfer=number), soon())
    answer = connection.receive(soon())
    assert isinstance(answer, Refused)
    assert "only 0 bytes" in answer.detail
    connection.close()
    assert holder.vault.inventory() == ()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 10), (5, 10), (-CHUNK_NBYTES, 10), (LARGE + CHUNK_NBYTES, 10), (CHUNK_NBYTES, LARGE), (0, 0)],
)
def test_parts_that_overlap_or_lie_outside_are_refused(holder: Site, offset: int, nbytes: int) -> None:
    connection, number = begin(holder)
    assert isinstance(send_part(connection, number, 0, bytes(100)), Received)
    with pytest.raises(PeerUnreachable):
        send_part(connection, number, offset, bytes(min(nbytes, 1000)) if nbytes < LARGE else bytes(LARGE))
    connection.close()
    eventually(lambda: holder.server.stats().connections == 0)
    assert holder.vault.inventory() == ()


def test_a_part_of_a_transfer_that_does_not_exist_is_refused(holder: Site) -> None:
    connection = holder.raw()
    connection.send(Part(transfer=5, offset=0, nbytes=10), soon())
    answer = connection.receive(soon())
    assert isinstance(answer, Refused)
    assert answer.reason is channel.Reason.NOT_HELD
    connection.close()


def test_only_the_connection_that_began_a_transfer_may_commit_it(holder: Site) -> None:
    connection, number = begin(holder, CHUNK_NBYTES + 1)
    other = holder.raw()
    send_part(connection, number, 0, bytes(CHUNK_NBYTES + 1))
    other.send(Commit(transfer=number), soon())
    assert isinstance(other.receive(soon()), Refused)
    assert holder.vault.inventory() == ()
    connection.send(Commit(transfer=number), soon())
    assert isinstance(connection.receive(soon()), channel.Ack)
    assert held(holder.vault, REPLICA) == [(0, 1)]
    for each in (connection, other):
        each.close()


@pytest.mark.parametrize("parts_sent", [0, 1])
def test_a_transfer_that_is_begun_and_left_is_given_up(parts_sent: int) -> None:
    with Site(limits=ServerLimits(progress_s=0.1)) as holder:
        connection, number = begin(holder, CHUNK_NBYTES + 1)
        if parts_sent:
            send_part(connection, number, 0, bytes(CHUNK_NBYTES + 1))
        eventually(lambda: holder.server.stats().transfers == 0)
        eventually(lambda: holder.server.stats().connections == 0)
        connection.close()
        assert holder.vault.inventory() == ()


def test_an_unused_connection_is_kept(owner: Site) -> None:
    with Site(limits=ServerLimits(progress_s=0.02)) as holder:
        connection = holder.raw()
        assert not connection.readable(0.2)
        connection.send(FETCH, soon())
        assert isinstance(connection.receive(soon()), Refused)
        connection.close()


def test_a_transfer_ends_with_the_connection_that_began_it(holder: Site) -> None:
    connection, number = begin(holder)
    other = holder.raw()
    other.send(Part(transfer=number, offset=0, nbytes=CHUNK_NBYTES), soon())
    other.send_raw(b"half", soon())
    eventually(lambda: bool(holder.server._incoming[number]._active))
    connection.close()
    with pytest.raises(PeerUnreachable):
        other.receive(soon())
    other.close()
    eventually(lambda: holder.server.stats().connections == 0)
    assert not holder.server._incoming
    writer = holder.vault.begin_replica(section(unique=LARGE))
    assert holder.vault.bytes_reserved == LARGE
    writer.abandon()


def test_a_range_that_does_not_exist_is_refused(holder: Site) -> None:
    complete(holder.vault, section(unique=10))
    connection = holder.raw()
    for offset, nbytes in ((0, 11), (CHUNK_NBYTES, 0), (3, 2), (-CHUNK_NBYTES, 5), (0, -1)):
        connection.send(replace(FETCH, offset=offset, nbytes=nbytes), soon())
        answer = connection.receive(soon())
        assert isinstance(answer, Refused)
        assert answer.reason is channel.Reason.MALFORMED
    connection.close()


SECTIONS = st.builds(
    SectionId,
    owner=st.integers(0, 2**40),
    step=st.integers(0, 2**40),
    generation=st.integers(0, 2**40),
    shared_nbytes=st.integers(0, 2**50),
    unique_nbytes=st.integers(0, 2**50),
)
NUMBERS = st.integers(-(2**62), 2**62)
SUMS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
MESSAGES = st.one_of(
    st.builds(Push, section=SECTIONS, inline=st.booleans()),
    st.builds(Ready, transfer=NUMBERS),
    st.builds(Part, transfer=NUMBERS, offset=NUMBERS, nbytes=NUMBERS),
    st.builds(End, checksums=SUMS, intact=st.booleans()),
    st.builds(Received, offset=NUMBERS),
    st.builds(Commit, transfer=NUMBERS),
    st.builds(channel.Ack, section=SECTIONS),
    st.builds(
        Fetch,
        owner=NUMBERS,
        step=NUMBERS,
        kind=st.sampled_from(SectionKind),
        section_nbytes=NUMBERS,
        offset=NUMBERS,
        nbytes=NUMBERS,
    ),
    st.builds(Offer, section=SECTIONS),
    st.builds(Refused, reason=st.sampled_from(channel.Reason), detail=st.text(max_size=50)),
)


@given(MESSAGES)
def test_every_message_survives_the_wire(message: channel.Message) -> None:
    assert channel._CODEC.decode(channel._CODEC.encode(message)) == message


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x93\x01\xa4Push\xc0")
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        channel._CODEC.decode(data)


@given(MESSAGES, st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(message: channel.Message, data: st.DataObject) -> None:
    encoded = bytearray(channel._CODEC.encode(message))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    cut_at = data.draw(st.integers(0, len(encoded)))
    for candidate in (bytes(encoded), bytes(encoded[:cut_at])):
        with contextlib.suppress(ProtocolError):
            channel._CODEC.decode(candidate)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=100), MESSAGES.map(channel._CODEC.encode)))
def test_whatever_an_authenticated_peer_says_the_server_goes_on(holder: Site, payload: bytes) -> None:
    connection = holder.raw()
    connection.send_raw(connection._writer.frame(payload), soon())
    connection._sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(PeerUnreachable, AuthError, ProtocolError):
        connection.receive(soon())
    connection.close()
    with Site() as owner:
        version = section(owner=1, generation=2**50)
        complete(owner.vault, version)
        owner.client.push(holder.endpoint, owner.vault, version, deadline_s=5)
    assert (1, 1) in held(holder.vault, REPLICA)
    assert all(item.slot == 1 or item.unique_nbytes == 0 for item in replicas(holder.vault))


def test_the_limits_of_the_tests_are_those_of_a_server() -> None:
    assert LIMITS.transfers_max == ServerLimits().transfers_max
    assert len(TOKEN) >= 16
