"""Two nodes' memories on a real network: what arrives, and how often what happens on the way."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from replication_kit import OTHER_TOKEN, Site, complete, content, eventually, held, replicas, section

from hotswap.core.types import Endpoint, HeldKind
from hotswap.errors import AuthError, Fenced, IntegrityError, LayoutMismatch, PeerUnreachable, ProtocolError, UsageError
from hotswap.replication import sections
from hotswap.replication.channel import INLINE_NBYTES_MAX, Connection, Deadline, Push, Ready, Refused
from hotswap.replication.handles import Lease
from hotswap.replication.sections import CHUNK_NBYTES, NotHeld, SectionId, SectionKind
from hotswap.replication.transfer import Busy, ServerLimits, TransferClient, TransferServer
from hotswap.replication.vault import Vault

OWN, REPLICA = HeldKind.OWN, HeldKind.REPLICA
SHARED, UNIQUE = SectionKind.SHARED, SectionKind.UNIQUE
LARGE = 3 * CHUNK_NBYTES + 12_345


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
    """Use several connections already for what is quick to send."""
    monkeypatch.setattr(sections, "PART_NBYTES_MIN", CHUNK_NBYTES)


def push(owner: Site, holder: Site, version: SectionId, deadline_s: float = 10.0) -> bytes:
    """Complete a snapshot and push it; returns its unique section."""
    data = complete(owner.vault, version)
    ack = owner.client.push(holder.endpoint, owner.vault, version, deadline_s=deadline_s)
    assert ack.section == version
    return data[version.shared_nbytes :]


def fetch(site: Site, source: Site, version: SectionId, kind: SectionKind) -> bytes:
    into = memoryview(bytearray(version.nbytes(kind)))
    site.client.fetch(source.endpoint, version.owner, version.step, kind, into, deadline_s=10)
    return bytes(into)


def stored(site: Site, version: SectionId) -> bytes:
    with site.vault.open(version.owner, version.step, UNIQUE, REPLICA) as lease:
        assert lease.section == version
        return copied(lease, "there")


def copied(lease: Lease, where: str, threads: int = 2) -> bytes:
    into = bytearray(lease.nbytes)
    lease.copy_to(memoryview(into), where, threads=threads)
    return bytes(into)


SIZES = [0, 1, 1000, INLINE_NBYTES_MAX - 1, INLINE_NBYTES_MAX, INLINE_NBYTES_MAX + 1, 2 * CHUNK_NBYTES, LARGE]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_replica_arrives_whole_and_can_be_fetched_back(owner: Site, holder: Site, nbytes: int) -> None:
    version = section(owner=5, step=3, unique=nbytes)
    data = push(owner, holder, version)
    assert stored(holder, version) == data
    assert [(item.shared_nbytes, item.unique_nbytes) for item in replicas(holder.vault)] == [(100, nbytes)]
    assert fetch(owner, holder, version, UNIQUE) == data


@pytest.mark.parametrize("nbytes", [0, 77, LARGE])
def test_a_shared_section_is_fetched_from_a_peer_s_own_snapshot(owner: Site, holder: Site, nbytes: int) -> None:
    version = section(owner=2, step=6, shared=nbytes, unique=500)
    data = complete(holder.vault, version)
    assert fetch(owner, holder, version, SHARED) == data[:nbytes]
    assert fetch(owner, holder, version, UNIQUE) == data[nbytes:]


def test_the_parts_of_a_section_are_cut_between_chunks() -> None:
    for nbytes in (0, 1, CHUNK_NBYTES, LARGE, 9 * CHUNK_NBYTES):
        for streams in (1, 2, 3, 8):
            parts = sections.spans(nbytes, streams)
            assert parts[0][0] == 0
            assert parts[-1][1] == nbytes
            assert all(left[1] == right[0] for left, right in pairwise(parts))
            assert all(start % CHUNK_NBYTES == 0 for start, _ in parts)
            assert len(parts) <= streams


def test_a_restored_step_is_pushed_again_as_part_of_the_new_generation(owner: Site, holder: Site) -> None:
    data = complete(owner.vault, section(step=4, generation=1))
    holder.vault.fence(2)
    version = section(step=4, generation=2)
    owner.client.push(holder.endpoint, owner.vault, version, deadline_s=5)
    assert stored(holder, version) == data[100:]


def test_the_owner_knows_the_checksums_of_what_it_has_pushed(owner: Site, holder: Site) -> None:
    version = section()
    push(owner, holder, version)
    with owner.vault.open(0, 1, UNIQUE, OWN) as lease:
        assert lease.checksums is not None
        lease.view[3] ^= 1
        with pytest.raises(IntegrityError, match="slot 0 at step 1"):
            copied(lease, "here")


@pytest.mark.parametrize("nbytes", [1000, LARGE])
def test_bytes_that_rotted_at_the_holder_are_not_restored(owner: Site, holder: Site, nbytes: int) -> None:
    version = section(unique=nbytes)
    push(owner, holder, version)
    with holder.vault.open(0, 1, UNIQUE, REPLICA) as lease:
        lease.view[nbytes // 2] ^= 1
    with pytest.raises(
        IntegrityError, match=rf"unique section of slot 0 at step 1 .* fetched from 127.0.0.1:{holder.server.port}"
    ):
        fetch(owner, holder, version, UNIQUE)


def test_what_is_not_held_or_has_another_length_is_refused(owner: Site, holder: Site) -> None:
    version = section()
    push(owner, holder, version)
    with pytest.raises(NotHeld, match="slot 0 at step 2"):
        fetch(owner, holder, section(step=2), UNIQUE)
    with pytest.raises(NotHeld, match="shared section"):
        fetch(owner, holder, version, SHARED)
    with pytest.raises(IntegrityError, match="1000 bytes, not 999"):
        fetch(owner, holder, section(unique=999), UNIQUE)
    with pytest.raises(NotHeld):
        owner.client.push(holder.endpoint, owner.vault, section(step=8), deadline_s=1)
    with pytest.raises(LayoutMismatch):
        owner.client.push(holder.endpoint, owner.vault, section(unique=3), deadline_s=1)
    assert holder.server.stats().refused == {"not_held": 2, "corrupt": 1}


def test_a_small_push_takes_one_connection_that_is_used_again(owner: Site, holder: Site) -> None:
    for step in range(1, 30):
        push(owner, holder, section(step=step))
    assert holder.server.stats().connections == 1
    assert holder.server.stats().replicas == 29
    assert held(holder.vault, REPLICA) == [(0, 28), (0, 29)]


# --- fencing ---


@pytest.mark.parametrize("nbytes", [1000, LARGE])
def test_a_push_of_an_ended_generation_is_fenced_off(owner: Site, holder: Site, nbytes: int) -> None:
    holder.vault.fence(5)
    with pytest.raises(Fenced, match="generation 5 has begun"):
        push(owner, holder, section(generation=4, unique=nbytes))
    assert replicas(holder.vault) == []
    push(owner, holder, section(generation=5, unique=nbytes))


def test_a_holder_that_is_behind_accepts_and_learns_nothing(owner: Site, holder: Site) -> None:
    holder.vault.fence(2)
    push(owner, holder, section(generation=7))
    assert holder.vault.generation == 2
    assert held(holder.vault, REPLICA) == [(0, 1)]


@pytest.mark.parametrize("nbytes", [2 * 1024 * 1024, LARGE])
def test_a_fence_in_the_middle_of_a_push_makes_it_void(owner: Site, holder: Site, nbytes: int) -> None:
    push(owner, holder, section(step=1, unique=nbytes))
    sent: list[int] = []

    def fence(version: SectionId, nbytes_sent: int) -> None:
        sent.append(nbytes_sent)
        holder.vault.fence(2)

    owner.client.on_chunk = fence
    # Which of the two depends on whose answer comes first: that of a part's connection, or that of one that came too late.
    with pytest.raises((Fenced, NotHeld)):
        push(owner, holder, section(step=2, unique=nbytes))
    owner.client.on_chunk = None
    assert sent
    assert held(holder.vault, REPLICA) == [(0, 1)]
    # The holder stops taking bytes that nobody will ever want.
    assert holder.server.stats().bytes_in == nbytes
    push(owner, holder, section(step=2, generation=2, unique=nbytes))
    eventually(lambda: holder.vault.bytes_reserved == 2 * nbytes)


def test_a_step_backwards_is_refused_at_the_holder(owner: Site, holder: Site) -> None:
    push(owner, holder, section(step=5))
    owner.vault.truncate(0, 0, before=2)
    with pytest.raises(ProtocolError, match="was offered after"):
        push(owner, holder, section(step=4))


def test_on_chunk_always_comes_before_the_holder_has_the_whole(owner: Site, holder: Site) -> None:
    for step, nbytes in enumerate((10, 1_500_000, LARGE), start=1):
        seen: list[int] = []

        def look(version: SectionId, sent: int, step: int = step, seen: list[int] = seen) -> None:
            assert (version.owner, version.step) == (0, step)
            assert (0, step) not in held(holder.vault, REPLICA)
            seen.append(sent)

        owner.client.on_chunk = look
        push(owner, holder, section(step=step, unique=nbytes))
        assert max(seen) == nbytes


# --- limits ---


def test_a_holder_without_memory_says_so(owner: Site, holder: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(owner.vault, section())
    monkeypatch.setattr("hotswap.replication.memory.memory_available_bytes", lambda: 999)
    with pytest.raises(UsageError, match="no memory for 'hotswap replica 0': 1000 bytes asked, 999"):
        owner.client.push(holder.endpoint, owner.vault, section(), deadline_s=5)
    assert holder.server.stats().refused == {"memory": 1}


def occupy(site: Site) -> Connection:
    """Begin a transfer and leave it there."""
    connection = site.raw()
    connection.send(Push(section=section(owner=99, unique=LARGE), inline=False), Deadline(2, 2))
    assert isinstance(connection.receive(Deadline(2, 2)), Ready)
    return connection


@pytest.mark.parametrize("nbytes", [1000, LARGE])
def test_a_holder_with_enough_to_do_says_busy_and_the_pusher_waits(owner: Site, nbytes: int) -> None:
    with Site(limits=ServerLimits(transfers_max=1)) as holder:
        blocker = occupy(holder)
        with pytest.raises(Busy, match="1 transfers"):
            push(owner, holder, section(unique=nbytes), deadline_s=0.1)
        assert replicas(holder.vault) == []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(push, owner, holder, section(step=2, unique=nbytes))
            refused = holder.server.stats().refused["busy"]
            eventually(lambda: holder.server.stats().refused["busy"] > refused)
            blocker.close()
            waiting.result(10)
        assert held(holder.vault, REPLICA) == [(0, 2)]


def test_connections_beyond_the_limit_are_closed_at_once(owner: Site) -> None:
    with Site(limits=ServerLimits(connections_max=1)) as holder:
        first = holder.raw()
        with pytest.raises(PeerUnreachable):
            push(owner, holder, section())
        first.close()
        eventually(lambda: holder.server.stats().connections == 0)
        push(owner, holder, section(step=2))


def test_many_slots_push_and_fetch_at_the_same_time(owner: Site, holder: Site) -> None:
    def life(slot: int) -> None:
        for step in range(1, 12):
            version = section(owner=slot, step=step, unique=LARGE if slot == 0 and step % 4 == 0 else 20_000 + slot)
            data = push(owner, holder, version)
            assert fetch(owner, holder, version, UNIQUE) == data

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(life, slot) for slot in range(8)]:
            job.result(60)
    assert held(holder.vault, REPLICA) == [(slot, step) for slot in range(8) for step in (10, 11)]
    assert holder.server.stats().refused == {}
    assert holder.server.stats().connections <= 10


def test_each_node_may_hold_for_the_other(owner: Site, holder: Site) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(push, owner, holder, section(owner=1, unique=LARGE))
        two = pool.submit(push, holder, owner, section(owner=2, unique=LARGE))
        sent = one.result(10), two.result(10)
    received = stored(holder, section(owner=1, unique=LARGE)), stored(owner, section(owner=2, unique=LARGE))
    assert received == sent


# --- peers that are gone, strange or stuck ---


def test_a_peer_that_is_not_there_is_unreachable(owner: Site) -> None:
    probe = socket.create_server(("127.0.0.1", 0))
    nobody = Endpoint(host="127.0.0.1", port=probe.getsockname()[1])
    probe.close()
    complete(owner.vault, section())
    with pytest.raises(PeerUnreachable, match="cannot be reached"):
        owner.client.push(nobody, owner.vault, section(), deadline_s=5)


def test_a_host_name_is_refused_because_it_would_need_a_name_server(owner: Site) -> None:
    complete(owner.vault, section())
    with pytest.raises(UsageError, match="numeric"):
        owner.client.push(Endpoint(host="localhost", port=1), owner.vault, section(), deadline_s=5)
    with pytest.raises(UsageError, match="numeric"):
        TransferServer(Vault(), token=OTHER_TOKEN, bind_host="localhost")


def test_ipv6_works_too(owner: Site) -> None:
    try:
        server = TransferServer(Vault(), token="t" * 64, bind_host="::1")
    except OSError:
        pytest.skip("this host has no IPv6")
    client = TransferClient(token="t" * 64)
    server.start()
    complete(owner.vault, section())
    client.push(Endpoint(host="::1", port=server.port), owner.vault, section(), deadline_s=5)
    client.close()
    server.close()


def test_a_port_that_is_taken_is_reported(holder: Site) -> None:
    with pytest.raises(OSError, match="in use"):
        TransferServer(Vault(), token=OTHER_TOKEN, port=holder.server.port)


def test_a_peer_of_another_job_is_refused_by_either_side(owner: Site) -> None:
    with Site(token=OTHER_TOKEN) as stranger:
        complete(owner.vault, section())
        with pytest.raises(AuthError, match="data channel"):
            owner.client.push(stranger.endpoint, owner.vault, section(), deadline_s=5)
        eventually(lambda: stranger.server.stats().refused == {"handshake": 1})
        assert stranger.vault.inventory() == ()


def test_a_peer_that_answers_nothing_ends_at_the_progress_limit(owner: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = TransferClient(token="t" * 64, progress_s=0.1, connect_s=0.2)
        complete(owner.vault, section())
        began = time.monotonic()
        with pytest.raises(PeerUnreachable):
            client.push(Endpoint(host="127.0.0.1", port=silent.getsockname()[1]), owner.vault, section(), deadline_s=30)
        assert time.monotonic() - began < 5
        client.close()


def test_a_holder_that_stops_reading_ends_at_the_progress_limit(owner: Site, holder: Site) -> None:
    """The holder takes the request and part of the bytes, then nothing more."""
    stuck = threading.Event()
    connection_into = Connection.receive_into

    def receive_into(self: Connection, *args: object, **options: object) -> tuple[int, ...]:
        stuck.wait(10)
        return connection_into(self, *args, **options)  # type: ignore[arg-type]

    client = TransferClient(token="0123456789abcdef" * 4, progress_s=0.3)
    complete(owner.vault, section(unique=8 * CHUNK_NBYTES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "receive_into", receive_into)
        with pytest.raises(PeerUnreachable, match="no progress"):
            client.push(holder.endpoint, owner.vault, section(unique=8 * CHUNK_NBYTES), deadline_s=30)
        stuck.set()
    client.close()
    eventually(lambda: holder.server.stats().connections == 0)
    assert replicas(holder.vault) == []


def test_the_total_deadline_holds_even_if_bytes_trickle(owner: Site, holder: Site) -> None:
    owner.client.on_chunk = lambda version, sent: time.sleep(0.05)
    with pytest.raises(PeerUnreachable, match=r"within 0.2 s"):
        push(owner, holder, section(unique=LARGE), deadline_s=0.2)
    eventually(lambda: holder.server.stats().connections == 0)
    assert replicas(holder.vault) == []


def test_interrupt_ends_what_is_going_on_and_nothing_later(owner: Site, holder: Site) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(version: SectionId, sent: int) -> None:
        reached.set()
        go_on.wait(10)

    owner.client.on_chunk = hold
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(push, owner, holder, section(unique=LARGE))
        assert reached.wait(5)
        owner.client.interrupt()
        go_on.set()
        with pytest.raises(PeerUnreachable):
            job.result(5)
    owner.client.on_chunk = None
    push(owner, holder, section(step=2, unique=LARGE))


def test_interrupt_wakes_a_pusher_that_waits_for_a_busy_holder(owner: Site) -> None:
    with Site(limits=ServerLimits(transfers_max=1)) as holder, ThreadPoolExecutor(1) as pool:
        blocker = occupy(holder)
        job = pool.submit(push, owner, holder, section())
        eventually(lambda: holder.server.stats().refused.get("busy", 0) > 2)
        owner.client.interrupt()
        with pytest.raises((Busy, PeerUnreachable)):
            job.result(5)
        blocker.close()


def test_a_closed_client_refuses_politely(owner: Site, holder: Site) -> None:
    push(owner, holder, section())
    owner.client.close()
    complete(owner.vault, section(step=2))
    with pytest.raises(PeerUnreachable, match="have ended"):
        owner.client.push(holder.endpoint, owner.vault, section(step=2), deadline_s=5)
    eventually(lambda: holder.server.stats().connections == 0)


# --- kept connections ---


def test_a_restarted_holder_is_reached_through_a_new_connection(owner: Site) -> None:
    vault = Vault()
    first = TransferServer(vault, token="0123456789abcdef" * 4)
    first.start()
    endpoint = Endpoint(host="127.0.0.1", port=first.port)
    complete(owner.vault, section(step=1))
    owner.client.push(endpoint, owner.vault, section(step=1), deadline_s=5)
    first.close()
    second = TransferServer(vault, token="0123456789abcdef" * 4, port=endpoint.port)
    second.start()
    complete(owner.vault, section(step=2))
    owner.client.push(endpoint, owner.vault, section(step=2), deadline_s=5)
    second.close()
    assert held(vault, REPLICA) == [(0, 1), (0, 2)]
    vault.close()


def test_a_kept_connection_that_dies_under_a_request_is_replaced_once(
    owner: Site, holder: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at an idle connection can't see an end that is still on its way."""
    push(owner, holder, section(step=1))
    kept = owner.client._idle[holder.endpoint][0]
    kept.interrupt()
    monkeypatch.setattr(Connection, "quiet", property(lambda self: True))
    push(owner, holder, section(step=2))
    assert held(holder.vault, REPLICA) == [(0, 1), (0, 2)]


def test_connections_to_a_dead_peer_are_dropped_when_another_is_asked(owner: Site, holder: Site) -> None:
    with Site() as mortal:
        push(owner, mortal, section(step=1))
        assert mortal.endpoint in owner.client._idle
    push(owner, holder, section(step=2))
    assert set(owner.client._idle) == {holder.endpoint}


def test_after_every_kind_of_error_the_next_push_works(
    owner: Site, holder: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.vault.fence(3)
    for step, nbytes in enumerate((1000, LARGE), start=1):
        with pytest.raises(Fenced):
            push(owner, holder, section(step=step, unique=nbytes, generation=1))
        with monkeypatch.context() as patch:
            patch.setattr("hotswap.replication.memory.memory_available_bytes", lambda: 0)
            with pytest.raises(UsageError):
                owner.client.push(
                    holder.endpoint, owner.vault, section(step=step, unique=nbytes, generation=3), deadline_s=5
                )
        push(owner, holder, section(step=step, unique=nbytes, generation=3))


def test_nothing_is_left_when_all_is_closed() -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = resources()
    for _ in range(3):
        with Site() as owner, Site() as holder:
            for step in range(1, 4):
                push(owner, holder, section(step=step, unique=LARGE))
            with pytest.raises(NotHeld):
                fetch(owner, holder, section(step=99), UNIQUE)
            vaults = (owner.vault, holder.vault)
        assert [vault.bytes_reserved for vault in vaults] == [0, 0]
    # Not equal: what an earlier test had left to the garbage collector may go meanwhile.
    eventually(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))


def test_a_refusal_keeps_its_reason(holder: Site) -> None:
    connection = holder.raw()
    holder.vault.fence(9)
    connection.send(Push(section=section(unique=LARGE), inline=False), Deadline(2, 2))
    answer = connection.receive(Deadline(2, 2))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error("node3"), Fenced)
    assert str(answer.error("node3")).startswith("node3: ")
    connection.close()


def test_content_is_different_for_every_version() -> None:
    assert len({content(o, s, g, 50) for o in range(3) for s in range(3) for g in range(3)}) == 27
