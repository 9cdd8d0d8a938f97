"""What is visible in a vault, what never becomes visible, and what is never overwritten."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from replication_kit import complete, content, eventually, held, section

from hotswap.core.types import HeldKind
from hotswap.errors import Fenced, IntegrityError, LayoutMismatch, PeerUnreachable, ProtocolError, UsageError
from hotswap.replication import vault as vault_module
from hotswap.replication.buffers import Located
from hotswap.replication.sections import CHUNK_NBYTES, NotHeld, SectionId, SectionKind, checksums
from hotswap.replication.vault import Vault

OWN, REPLICA = HeldKind.OWN, HeldKind.REPLICA
SHARED, UNIQUE = SectionKind.SHARED, SectionKind.UNIQUE


@pytest.fixture
def vault() -> Vault:
    return Vault(where="in test memory")


def receive(vault: Vault, of: SectionId) -> bytes:
    """A whole, good replica."""
    data = content(of.owner, of.step, of.generation, of.unique_nbytes)
    writer = vault.begin_replica(of)
    writer.view[:] = data
    writer.commit(checksums(memoryview(data)))
    return data


def read(vault: Vault, owner: int, step: int, kind: SectionKind, where: HeldKind | None = None) -> bytes:
    with vault.open(owner, step, kind, where) as lease:
        return bytes(lease.view)


# --- own snapshots ---


def test_a_snapshot_is_visible_only_once_it_is_complete(vault: Vault) -> None:
    vault.reserve(3, 1100, 2)
    vault.snapshot_begin(3, 0)
    assert vault.inventory() == ()
    data = complete(vault, section(owner=3, step=7))
    assert held(vault, OWN) == [(3, 7)]
    assert read(vault, 3, 7, SHARED) == data[:100]
    assert read(vault, 3, 7, UNIQUE) == data[100:]
    assert vault.find(3, 7) == Located(slot=3, step=7, buffer=0, shared_nbytes=100, unique_nbytes=1000)
    assert vault.find(3, 6) is None
    assert vault.find(4, 7) is None


def test_the_inventory_says_lengths_and_is_in_order(vault: Vault) -> None:
    receive(vault, section(owner=5, step=2))
    complete(vault, section(owner=1, step=2))
    complete(vault, section(owner=0, step=2, shared=0))
    assert [(h.kind, h.slot, h.shared_nbytes, h.unique_nbytes) for h in vault.inventory()] == [
        (OWN, 0, 0, 1000),
        (OWN, 1, 100, 1000),
        (REPLICA, 5, 100, 1000),
    ]


def test_the_next_buffer_is_never_the_one_with_the_newest_version(vault: Vault) -> None:
    for step in range(1, 8):
        complete(vault, section(step=step))
        found = vault.find(0, step)
        assert found is not None
        assert vault.next_buffer(0) != found.buffer
        assert held(vault, OWN) == [(0, s) for s in (step - 1, step) if s]


def test_not_even_a_restore_that_is_going_on_makes_the_newest_version_the_next_to_go(vault: Vault) -> None:
    complete(vault, section(step=1))
    newest = vault.find(0, 1)
    adoption = vault.begin_adoption(section(step=2))
    assert newest is not None
    assert vault.next_buffer(0) != newest.buffer
    adoption.abandon()


def test_a_torn_buffer_is_used_again_before_a_complete_one(vault: Vault) -> None:
    complete(vault, section(step=1))
    torn = vault.next_buffer(0)
    vault.snapshot_begin(0, torn)
    assert vault.next_buffer(0) == torn
    assert held(vault, OWN) == [(0, 1)]


def test_what_a_worker_begins_to_overwrite_no_longer_counts(vault: Vault) -> None:
    for step in (1, 2):
        complete(vault, section(step=step))
    with vault.open(0, 1, UNIQUE) as lease:
        assert lease.intact
        vault.snapshot_begin(0, vault.next_buffer(0))
        assert not lease.intact
    assert held(vault, OWN) == [(0, 2)]


def test_a_pinned_snapshot_is_not_overwritten_until_it_is_unpinned(vault: Vault) -> None:
    vault.reserve(0, 1100, 3)
    data = complete(vault, section(step=1))
    where = vault.pin(0, 1)
    assert where == vault.pin(0, 1)
    for step in range(2, 9):
        assert vault.next_buffer(0) != where.buffer
        complete(vault, section(step=step))
        assert read(vault, 0, 1, UNIQUE) == data[100:]
        assert held(vault, OWN) == [(0, s) for s in sorted({1, max(2, step - 1), step})]
    vault.unpin(0, 1)
    vault.unpin(0, 1)
    complete(vault, section(step=9))
    assert held(vault, OWN) == [(0, 7), (0, 8), (0, 9)]


def test_a_pin_that_would_leave_too_few_buffers_is_refused(vault: Vault) -> None:
    complete(vault, section(step=1))
    with pytest.raises(UsageError, match="leaves 1 of 2"):
        vault.pin(0, 1)
    vault.reserve(0, 1100, 3)
    complete(vault, section(step=2))
    vault.pin(0, 1)
    with pytest.raises(UsageError, match="leaves 1 of 3"):
        vault.pin(0, 2)
    with pytest.raises(NotHeld):
        vault.pin(0, 99)


def test_reserving_again_grants_the_same_memory_with_its_contents(vault: Vault) -> None:
    first = vault.reserve(0, 1100, 2)
    data = complete(vault, section(step=4))
    again = vault.reserve(0, 500, 2)
    assert [file.fd for file in again] == [file.fd for file in first]
    assert read(vault, 0, 4, UNIQUE) == data[100:]
    more = vault.reserve(0, 1000, 3)
    assert more[:2] == first
    assert more[2].nbytes == 1100


def test_larger_memory_keeps_old_snapshots_readable_until_newer_ones_supersede_them(vault: Vault) -> None:
    data = {step: complete(vault, section(step=step)) for step in (1, 2)}
    vault.reserve(0, 5000, 2)
    assert vault.find(0, 2) is None
    assert held(vault, OWN) == [(0, 1), (0, 2)]
    assert read(vault, 0, 2, UNIQUE) == data[2][100:]
    vault.snapshot_begin(0, 0)
    complete(vault, section(step=3, unique=4000))
    assert held(vault, OWN) == [(0, 2), (0, 3)]
    complete(vault, section(step=4, unique=4000))
    assert held(vault, OWN) == [(0, 3), (0, 4)]
    assert vault.bytes_reserved == 10_000


def test_memory_that_is_still_being_read_is_freed_by_its_last_reader(vault: Vault) -> None:
    data = complete(vault, section(step=1))
    with vault.open(0, 1, UNIQUE) as lease:
        vault.forget(0)
        assert vault.inventory() == ()
        assert bytes(lease.view) == data[100:]
        assert vault.bytes_reserved == 1100
    assert vault.bytes_reserved == 0


def test_wrong_numbers_from_a_worker_are_refused(vault: Vault) -> None:
    with pytest.raises(UsageError, match="reserve"):
        vault.next_buffer(0)
    with pytest.raises(UsageError, match="torn"):
        vault.reserve(0, 10, 1)
    vault.reserve(0, 100, 2)
    with pytest.raises(ProtocolError, match="buffer 2 of 2"):
        vault.snapshot_begin(0, 2)
    with pytest.raises(LayoutMismatch, match="101 bytes, more than the 100"):
        vault.snapshot_complete(0, generation=1, step=1, buffer=0, shared_nbytes=1, unique_nbytes=100)
    with pytest.raises(NotHeld):
        vault.open(0, 1, UNIQUE)


# --- generations ---


def test_a_snapshot_of_an_ended_generation_is_void(vault: Vault) -> None:
    complete(vault, section(step=1, generation=1))
    vault.fence(2)
    with pytest.raises(Fenced, match="generation 2"):
        complete(vault, section(step=2, generation=1))
    assert held(vault, OWN) == [(0, 1)]
    complete(vault, section(step=2, generation=2))
    assert held(vault, OWN) == [(0, 1), (0, 2)]


def test_an_older_fence_changes_nothing(vault: Vault) -> None:
    vault.fence(5)
    vault.fence(3)
    assert vault.generation == 5
    with pytest.raises(Fenced):
        vault.begin_replica(section(generation=4))


def test_a_replica_in_the_making_dies_with_its_generation(vault: Vault) -> None:
    receive(vault, section(step=1, generation=1))
    writer = vault.begin_replica(section(step=2, generation=1))
    writer.view[:] = content(0, 2, 1, 1000)
    vault.fence(2)
    with pytest.raises(Fenced, match="generation 2"):
        writer.commit(checksums(writer.view))
    assert held(vault, REPLICA) == [(0, 1)]


def test_a_dead_writer_is_told_so_whatever_it_has_written(vault: Vault) -> None:
    writer = vault.begin_replica(section(generation=1))
    vault.fence(2)
    with pytest.raises(Fenced):
        writer.commit((1, 2, 3))


def test_a_restore_in_the_making_dies_with_its_generation(vault: Vault) -> None:
    vault.fence(2)
    vault.reserve(0, 1100, 2)
    adoption = vault.begin_adoption(section(generation=2))
    vault.fence(3)
    with pytest.raises(Fenced):
        adoption.commit()
    assert vault.inventory() == ()
    with pytest.raises(Fenced):
        vault.begin_adoption(section(generation=2))


def test_versions_of_an_undone_future_vanish_when_the_step_before_it_is_made_again(vault: Vault) -> None:
    for step in (5, 6):
        complete(vault, section(step=step, generation=1))
        receive(vault, section(owner=9, step=step, generation=1))
    vault.fence(2)
    complete(vault, section(step=5, generation=2))
    receive(vault, section(owner=9, step=5, generation=2))
    assert held(vault, OWN) == [(0, 5)]
    assert held(vault, REPLICA) == [(9, 5)]
    assert read(vault, 0, 5, UNIQUE) == content(0, 5, 2, 1100)[100:]
    assert read(vault, 9, 5, UNIQUE) == content(9, 5, 2, 1000)


def test_truncate_drops_what_is_newer_than_the_resume_step(vault: Vault) -> None:
    for step in (5, 6):
        complete(vault, section(step=step))
        receive(vault, section(step=step))
        complete(vault, section(owner=1, step=step))
    vault.truncate(0, 5, before=1)
    assert vault.find(0, 6) is not None, "it is of that very generation, in which nothing was undone yet"
    vault.truncate(0, 5, before=2)
    assert [(item.slot, item.step) for item in vault.inventory()] == [(0, 5), (1, 5), (1, 6), (0, 5)]
    assert vault.find(0, 6) is None


# --- replicas ---


def test_the_two_newest_versions_of_each_owner_are_kept(vault: Vault) -> None:
    for step in range(1, 6):
        receive(vault, section(owner=1, step=step))
        receive(vault, section(owner=2, step=step))
    assert held(vault, REPLICA) == [(1, 4), (1, 5), (2, 4), (2, 5)]
    assert vault.bytes_reserved == 4000
    assert vault.bytes_peak == 4000
    assert read(vault, 1, 4, UNIQUE) == content(1, 4, 1, 1000)


def test_more_versions_can_be_kept() -> None:
    vault = Vault(replica_versions=3)
    for step in range(1, 6):
        receive(vault, section(step=step))
    assert held(vault, REPLICA) == [(0, 3), (0, 4), (0, 5)]


def test_the_newest_version_survives_an_attempt_that_fails(vault: Vault) -> None:
    for step in (1, 2):
        receive(vault, section(step=step))
    for _ in range(5):
        vault.begin_replica(section(step=3)).abandon()
        assert (0, 2) in held(vault, REPLICA)
    assert vault.bytes_reserved == 2000


def test_a_replica_with_a_wrong_checksum_never_becomes_visible(vault: Vault) -> None:
    writer = vault.begin_replica(section(owner=4, step=9))
    data = bytearray(content(4, 9, 1, 1000))
    expected = checksums(memoryview(data))
    data[500] ^= 1
    writer.view[:] = data
    with pytest.raises(IntegrityError, match=r"slot 4 at step 9.*in test memory.*checksum"):
        writer.commit(expected)
    assert vault.inventory() == ()
    receive(vault, section(owner=4, step=9))
    assert held(vault, REPLICA) == [(4, 9)]


def test_too_few_checksums_are_no_match(vault: Vault) -> None:
    writer = vault.begin_replica(section())
    with pytest.raises(IntegrityError, match=r"0 checksums|1 checksums"):
        writer.commit(())


def test_the_damaged_chunk_is_named(vault: Vault) -> None:
    nbytes = 2 * CHUNK_NBYTES + 10
    receive(vault, section(unique=nbytes))
    with vault.open(0, 1, UNIQUE) as lease:
        into = memoryview(bytearray(nbytes))
        lease.copy_to(into, "on node7")
        assert into == lease.view
        lease.view[CHUNK_NBYTES + 5] ^= 1
        with pytest.raises(
            IntegrityError, match=rf"unique section of slot 0 at step 1 .*on node7: bytes from {CHUNK_NBYTES} "
        ):
            lease.copy_to(into, "on node7")


def test_a_second_attempt_makes_the_first_one_void(vault: Vault) -> None:
    first = vault.begin_replica(section(step=1))
    second = vault.begin_replica(section(step=1))
    data = content(0, 1, 1, 1000)
    first.view[:] = b"\xff" * 1000
    second.view[:] = data
    second.commit(checksums(memoryview(data)))
    with pytest.raises(Fenced, match="later attempt"):
        first.commit(checksums(first.view))
    assert read(vault, 0, 1, UNIQUE) == data
    assert vault.bytes_reserved == 2000


def test_the_same_version_once_more_does_not_cost_the_one_before(vault: Vault) -> None:
    for step in (1, 2):
        receive(vault, section(step=step))
    receive(vault, section(step=2))
    assert held(vault, REPLICA) == [(0, 1), (0, 2)]
    assert vault.bytes_reserved == 2000


def test_a_step_backwards_within_a_generation_is_refused(vault: Vault) -> None:
    receive(vault, section(step=5))
    with pytest.raises(ProtocolError, match=r"slot 0 at step 4 .* after one of slot 0 at step 5"):
        vault.begin_replica(section(step=4))


def test_a_version_that_is_being_read_is_not_overwritten(vault: Vault) -> None:
    data = receive(vault, section(step=1))
    with vault.open(0, 1, UNIQUE) as lease:
        for step in (2, 3, 4):
            receive(vault, section(step=step))
        assert bytes(lease.view) == data
        assert not lease.intact
    receive(vault, section(step=5))
    assert held(vault, REPLICA) == [(0, 4), (0, 5)]
    assert vault.bytes_reserved == 2000


def test_a_replica_that_grows_gets_larger_memory(vault: Vault) -> None:
    for step in range(1, 6):
        receive(vault, section(step=step, unique=1000 * step))
    assert held(vault, REPLICA) == [(0, 4), (0, 5)]
    assert vault.bytes_reserved == 9000


def test_an_empty_section_is_a_version_like_any_other(vault: Vault) -> None:
    receive(vault, section(unique=0))
    assert read(vault, 0, 1, UNIQUE) == b""


def test_a_replica_is_preferred_to_an_own_snapshot_unless_told_otherwise(vault: Vault) -> None:
    own = complete(vault, section(step=1))
    replica = receive(vault, section(step=1, generation=2))
    assert read(vault, 0, 1, UNIQUE) == replica
    assert read(vault, 0, 1, UNIQUE, OWN) == own[100:]
    with pytest.raises(NotHeld, match="shared section of slot 0 at step 1"):
        vault.open(0, 1, SHARED, REPLICA).close()


def test_memory_that_cannot_be_had_leaves_everything_as_it_was(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    receive(vault, section(step=1))
    complete(vault, section(owner=7))
    before = vault.inventory()
    monkeypatch.setattr("hotswap.replication.memory.memory_available_bytes", lambda: 3000)
    with pytest.raises(UsageError, match="4000 bytes asked"):
        vault.begin_replica(section(step=2, unique=4000))
    reserved = vault.bytes_reserved
    # Each of the two would fit.
    with pytest.raises(UsageError, match="5000 bytes asked"):
        vault.reserve(7, 2500, 2)
    assert vault.bytes_reserved == reserved
    assert vault.inventory() == before
    assert vault.next_buffer(7) in (0, 1)


# --- adoption ---


def test_a_slot_that_comes_here_is_put_together_from_fetched_sections(vault: Vault) -> None:
    vault.fence(2)
    vault.reserve(3, 2000, 2)
    unique = receive(vault, section(owner=3, step=8, generation=2))
    shared = content(1, 8, 1, 100)
    adoption = vault.begin_adoption(section(owner=3, step=8, generation=2))
    adoption.shared[:] = shared
    with vault.open(3, 8, UNIQUE, REPLICA) as lease:
        adoption.unique[:] = lease.view
        sums = lease.checksums
    assert vault.find(3, 8) is None
    where = adoption.commit(sums)
    assert where == vault.find(3, 8)
    file = vault.granted(3)[where.buffer]
    assert bytes(file.view()[:1100]) == shared + unique
    with vault.open(3, 8, UNIQUE, OWN) as lease:
        lease.copy_to(memoryview(bytearray(lease.nbytes)), "here")
        assert lease.checksums == sums
    assert vault.next_buffer(3) != where.buffer


def test_an_adoption_needs_memory_of_its_size(vault: Vault) -> None:
    with pytest.raises(UsageError, match="reserve"):
        vault.begin_adoption(section(owner=3))
    vault.reserve(3, 1000, 2)
    with pytest.raises(LayoutMismatch):
        vault.begin_adoption(section(owner=3))


def test_larger_memory_makes_an_adoption_void(vault: Vault) -> None:
    vault.reserve(3, 1100, 2)
    adoption = vault.begin_adoption(section(owner=3))
    vault.reserve(3, 2000, 2)
    with pytest.raises(Fenced, match="replaced"):
        adoption.commit()
    assert vault.bytes_reserved == 4000


def test_a_new_adoption_waits_until_nobody_writes_for_the_old_one(vault: Vault) -> None:
    vault.reserve(3, 1100, 2)
    old = vault.begin_adoption(section(owner=3))
    begun = threading.Event()
    result = []

    def begin() -> None:
        begun.set()
        result.append(vault.begin_adoption(section(owner=3, generation=2)))

    thread = threading.Thread(target=begin)
    thread.start()
    begun.wait(5)
    eventually(lambda: bool(old.dead))
    assert not result
    old.abandon()
    thread.join(5)
    result[0].commit()
    assert held(vault, OWN) == [(3, 1)]


def test_a_worker_that_writes_makes_a_restore_of_its_slot_void(vault: Vault) -> None:
    """Otherwise the restore would end later and put an older step over the newest one."""
    complete(vault, section(step=1))
    adoption = vault.begin_adoption(section(step=1, generation=2))
    vault.snapshot_begin(0, vault.next_buffer(0))
    with pytest.raises(Fenced, match="goes on without it"):
        adoption.commit()
    assert held(vault, OWN) == [(0, 1)]


def test_a_snapshot_in_a_buffer_that_a_dead_restore_still_writes_to_is_refused(vault: Vault) -> None:
    complete(vault, section(step=1))
    adoption = vault.begin_adoption(section(step=1, generation=2))
    with pytest.raises(ProtocolError, match="shares its buffer"):
        complete(vault, section(step=2))
    adoption.abandon()
    complete(vault, section(step=2))
    assert held(vault, OWN) == [(0, 1), (0, 2)]


def test_a_stuck_adoption_does_not_block_for_ever(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_module, "WRITER_EXIT_S", 0.01)
    vault.reserve(3, 1100, 2)
    vault.begin_adoption(section(owner=3))
    with pytest.raises(PeerUnreachable, match="did not end"):
        vault.begin_adoption(section(owner=3, generation=2))


# --- forgetting ---


def test_forget_drops_one_kind_or_both(vault: Vault) -> None:
    complete(vault, section())
    receive(vault, section())
    vault.forget(0, REPLICA)
    assert held(vault, REPLICA) == []
    assert vault.bytes_reserved == 2200
    receive(vault, section())
    vault.forget(0, OWN)
    assert (held(vault, OWN), held(vault, REPLICA)) == ([], [(0, 1)])
    vault.forget(0)
    vault.forget(77)
    assert vault.bytes_reserved == 0


def test_a_forgotten_owner_s_unfinished_replica_is_void_and_its_memory_freed(vault: Vault) -> None:
    writer = vault.begin_replica(section())
    vault.forget(0)
    assert vault.bytes_reserved == 1000
    with pytest.raises(Fenced, match="forgotten"):
        writer.commit(checksums(writer.view))
    assert vault.bytes_reserved == 0


def test_a_pinned_snapshot_outlives_forget_until_it_is_unpinned(vault: Vault) -> None:
    vault.reserve(0, 1100, 3)
    complete(vault, section())
    vault.pin(0, 1)
    vault.forget(0)
    assert vault.bytes_reserved == 1100
    vault.unpin(0, 1)
    assert vault.bytes_reserved == 0


def test_close_gives_back_all_memory_and_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    vault = Vault()
    vault.reserve(0, 5000, 3)
    complete(vault, section())
    vault.pin(0, 1)
    vault.reserve(0, 9000, 3)
    complete(vault, section(step=2))
    for step in (1, 2, 3):
        receive(vault, section(owner=4, step=step))
    writer = vault.begin_replica(section(owner=4, step=4))
    vault.close()
    writer.abandon()
    assert vault.bytes_reserved == 0
    assert vault.bytes_peak > 27_000
    assert vault.inventory() == ()
    del writer
    assert len(os.listdir("/proc/self/fd")) == before


def visible_before(vault: Vault, generation: int) -> set[SectionId]:
    """Every version of an earlier generation that anybody could read now."""
    found = set()
    for item in vault.inventory():
        with contextlib.suppress(NotHeld), vault.open(item.slot, item.step, UNIQUE, item.kind) as lease:
            found.add(lease.section)
    return {version for version in found if version.generation < generation}


def test_nothing_of_an_ended_generation_appears_however_the_threads_interleave() -> None:
    vault = Vault()
    for slot in range(4):
        vault.reserve(slot, 1100, 2)
    stop = threading.Event()
    steps = [0] * 4

    def work(slot: int) -> None:
        while not stop.is_set():
            steps[slot] = step = steps[slot] + 1
            version = section(owner=slot, step=step, generation=max(1, vault.generation))
            with contextlib.suppress(Fenced):
                complete(vault, version)
                receive(vault, version)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    try:
        for generation in range(2, 60):
            vault.fence(generation)
            at_the_fence, then = visible_before(vault, generation), list(steps)
            while min(now - before for now, before in zip(steps, then, strict=True)) < 3:
                assert visible_before(vault, generation) <= at_the_fence
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    vault.close()
    assert vault.bytes_reserved == 0


# --- what was compared ---


def test_the_state_that_was_compared_last_outlives_newer_ones(vault: Vault) -> None:
    vault.reserve(3, 1100, 3)
    for step in range(4):
        complete(vault, section(owner=3, step=step))
        receive(vault, section(owner=5, step=step))
    vault.keep((2, 3))
    for step in range(4, 9):
        complete(vault, section(owner=3, step=step)) if step < 5 else None
        receive(vault, section(owner=5, step=step))
        assert {2, 3} <= {found for _, found in held(vault, REPLICA)}
    assert held(vault, OWN) == [(3, 2), (3, 3), (3, 4)]
    # All three count: nothing is written until it is known whether the second one is good; then the first one goes.
    assert vault.next_buffer(3) == vault.find(3, 2).buffer  # type: ignore[union-attr]
    vault.keep((3,))
    complete(vault, section(owner=3, step=5))
    receive(vault, section(owner=5, step=9))
    assert held(vault, OWN) == [(3, 3), (3, 4), (3, 5)]
    assert held(vault, REPLICA) == [(5, 3), (5, 8), (5, 9)]


def test_a_kept_state_outlives_the_memory_it_is_in(vault: Vault) -> None:
    vault.reserve(3, 1100, 3)
    for step in (1, 2, 3):
        complete(vault, section(owner=3, step=step))
    vault.keep((1,))
    vault.reserve(3, 9900, 3)
    for step in (4, 5, 6):
        complete(vault, section(owner=3, step=step))
    assert held(vault, OWN) == [(3, 1), (3, 4), (3, 5), (3, 6)]
    vault.keep((6,))
    complete(vault, section(owner=3, step=7))
    assert held(vault, OWN) == [(3, 5), (3, 6), (3, 7)]


def test_keeping_takes_one_more_replica_and_no_more(vault: Vault) -> None:
    for step in range(20):
        if step % 5 == 1:
            vault.keep((step - 5, step - 1))
        if step % 5 == 3:
            vault.keep((step - 3,))
        receive(vault, section(owner=5, step=step))
        assert len(held(vault, REPLICA)) <= 4
    assert vault.bytes_peak <= 4 * 1000


def test_a_pin_leaves_room_to_write_beside_what_is_kept(vault: Vault) -> None:
    """With two pins the state to go back to would be the only one that may be overwritten."""
    vault.reserve(3, 1100, 4)
    for step in range(4):
        complete(vault, section(owner=3, step=step))
    vault.keep((2,))
    vault.pin(3, 2)
    with pytest.raises(UsageError, match="reserve more"):
        vault.pin(3, 3)
    vault.unpin(3, 2)
    vault.pin(3, 3)


def test_what_is_kept_of_a_slot_that_has_moved_stays_until_it_is_not_kept_any_more(vault: Vault) -> None:
    """Peers may turn out to differ later: then this may be the only copy of the state that they agreed on."""
    vault.reserve(3, 1100, 3)
    vault.keep((1,))
    for step in (1, 2, 3):
        complete(vault, section(owner=3, step=step))
        receive(vault, section(owner=5, step=step))
    for _ in range(2):
        vault.forget_moved(3, OWN, since=1)
        vault.forget_moved(5, REPLICA, since=1)
        assert held(vault, OWN) == [(3, 1)]
        assert held(vault, REPLICA) == [(5, 1)]
    assert vault.granted(3) == []
    assert vault.kept_nbytes(3) >= 1100
    assert read(vault, 3, 1, SHARED) and read(vault, 3, 1, UNIQUE, OWN)
    vault.keep((4,))
    vault.forget_moved(3, OWN, since=1)
    vault.forget_moved(5, REPLICA, since=1)
    assert held(vault, OWN) == held(vault, REPLICA) == []
    assert vault.bytes_reserved == vault.kept_nbytes(3) == 0


def test_a_slot_comes_back_to_what_is_kept_of_it(vault: Vault) -> None:
    vault.reserve(3, 1100, 3)
    for step in (1, 2):
        complete(vault, section(owner=3, step=step))
    vault.keep((1,))
    vault.forget_moved(3, OWN, since=1)
    vault.reserve(3, 1100, 3)
    # A worker that was a spare's before may want this memory: there is nothing in it that has moved.
    vault.forget_moved(3, OWN, since=1)
    assert len(vault.granted(3)) == 3
    for step in (5, 6, 7):
        complete(vault, section(owner=3, step=step, generation=2))
    assert held(vault, OWN) == [(3, 1), (3, 5), (3, 6), (3, 7)]
    vault.keep((7,))
    complete(vault, section(owner=3, step=8, generation=2))
    assert held(vault, OWN) == [(3, 6), (3, 7), (3, 8)]


def test_memory_that_a_spare_reserved_is_freed_beside_what_is_kept(vault: Vault) -> None:
    vault.reserve(3, 1100, 3)
    complete(vault, section(owner=3, step=1))
    vault.keep((1,))
    vault.forget_moved(3, OWN, since=1)
    before = vault.bytes_reserved
    vault.reserve(3, 5000, 2)
    vault.forget_empty(3)
    assert vault.bytes_reserved == before
    assert held(vault, OWN) == [(3, 1)]
    vault.close()
    assert vault.bytes_reserved == 0


def test_a_pinned_snapshot_outlives_the_memory_it_is_in(vault: Vault) -> None:
    vault.reserve(3, 1100, 3)
    complete(vault, section(owner=3, step=1))
    vault.pin(3, 1)
    for step in (2, 3):
        complete(vault, section(owner=3, step=step))
    vault.reserve(3, 9900, 2)
    assert held(vault, OWN) == [(3, 1), (3, 2), (3, 3)]
    vault.unpin(3, 1)
    assert held(vault, OWN) == [(3, 2), (3, 3)]
