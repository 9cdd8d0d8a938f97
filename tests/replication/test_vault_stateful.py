"""Any sequence of what workers, peers and the coordinator may do to a vault, against a model that keeps plain bytes.

The model knows nothing of buffers. It knows which bytes were made visible under which name, and so notices when a buffer
is handed out while it is still needed: then the bytes that are read back are those of another version.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from replication_kit import content

from hotswap.core.types import HeldKind
from hotswap.errors import Fenced, LayoutMismatch, PeerUnreachable, ProtocolError, UsageError
from hotswap.replication import vault as vault_module
from hotswap.replication.handles import Adoption, Lease, ReplicaWriter
from hotswap.replication.sections import NotHeld, SectionId, SectionKind, checksums
from hotswap.replication.vault import Vault

OWN, REPLICA = HeldKind.OWN, HeldKind.REPLICA
SHARED, UNIQUE = SectionKind.SHARED, SectionKind.UNIQUE
SLOTS = st.integers(0, 2)
SIZES = st.tuples(st.integers(0, 30), st.integers(0, 60))

Opened = tuple[Lease, HeldKind, bytes]


class VaultMachine(RuleBasedStateMachine):
    writers: Bundle[tuple[ReplicaWriter, bytes]] = Bundle("writers")
    adoptions: Bundle[tuple[Adoption, bytes]] = Bundle("adoptions")
    leases: Bundle[Opened] = Bundle("leases")

    @initialize()
    def begin(self) -> None:
        vault_module.WRITER_EXIT_S = 0.0
        self.vault = Vault()
        self.generation = 1
        self.steps = dict.fromkeys(range(3), 0)
        self.visible: dict[tuple[HeldKind, int, int], tuple[SectionId, bytes]] = {}
        self.pinned: dict[tuple[int, int], tuple[SectionId, bytes]] = {}
        self.adopting: list[int] = []
        self.versions = 0
        self.kept: int | None = None

    def name(self, slot: int, step: int, sizes: tuple[int, int], generation: int | None = None) -> SectionId:
        return SectionId(
            owner=slot,
            step=step,
            generation=generation or self.generation,
            shared_nbytes=sizes[0],
            unique_nbytes=sizes[1],
        )

    def fresh(self, nbytes: int) -> bytes:
        self.versions += 1
        return content(self.versions, 0, 0, nbytes)

    def appear(self, kind: HeldKind, version: SectionId, data: bytes) -> None:
        """What becomes visible replaces its own step and undone steps."""
        for key, (old, _) in list(self.visible.items()):
            undone = old.step > version.step and old.generation < version.generation
            if key[:2] == (kind, version.owner) and (old.step == version.step or undone):
                del self.visible[key]
        self.visible[kind, version.owner, version.step] = (version, data)

    # --- workers ---

    @rule(slot=SLOTS, nbytes=st.integers(1, 150), buffers=st.integers(2, 4))
    def reserve(self, slot: int, nbytes: int, buffers: int) -> None:
        granted = self.vault.reserve(slot, nbytes, buffers)
        assert len(granted) >= buffers
        assert all(file.nbytes >= nbytes for file in granted)

    def _write(self, slot: int, sizes: tuple[int, int], data: bytes) -> int | None:
        if not self.vault.granted(slot):
            return None
        index = self.vault.next_buffer(slot)
        file = self.vault.granted(slot)[index]
        if file.nbytes < sum(sizes):
            return None
        self.vault.snapshot_begin(slot, index)
        file.view()[: len(data)] = data
        return index

    @rule(slot=SLOTS, sizes=SIZES)
    def snapshot(self, slot: int, sizes: tuple[int, int]) -> None:
        data = self.fresh(sum(sizes))
        index = self._write(slot, sizes, data)
        if index is None:
            return
        self.steps[slot] += 1
        version = self.name(slot, self.steps[slot], sizes)
        try:
            self._complete(version, index)
        except ProtocolError:
            assert slot in self.adopting
            return
        self.appear(OWN, version, data)

    def _complete(self, version: SectionId, index: int) -> None:
        self.vault.snapshot_complete(
            version.owner,
            generation=version.generation,
            step=version.step,
            buffer=index,
            shared_nbytes=version.shared_nbytes,
            unique_nbytes=version.unique_nbytes,
        )

    @rule(slot=SLOTS, sizes=SIZES, share=st.floats(0, 1))
    def torn_snapshot(self, slot: int, sizes: tuple[int, int], share: float) -> None:
        data = self.fresh(sum(sizes))
        self._write(slot, sizes, data[: int(share * len(data))])

    @precondition(lambda self: self.generation > 1)
    @rule(slot=SLOTS, sizes=SIZES)
    def late_snapshot(self, slot: int, sizes: tuple[int, int]) -> None:
        index = self._write(slot, sizes, self.fresh(sum(sizes)))
        if index is None:
            return
        try:
            self._complete(self.name(slot, self.steps[slot] + 1, sizes, self.generation - 1), index)
        except (Fenced, ProtocolError):
            return
        raise AssertionError("a snapshot of an ended generation was accepted")

    @rule(slot=SLOTS, back=st.integers(0, 2))
    def pin(self, slot: int, back: int) -> None:
        try:
            self.vault.pin(slot, self.steps[slot] - back)
        except (NotHeld, UsageError):
            return
        self.pinned[slot, self.steps[slot] - back] = self.visible[OWN, slot, self.steps[slot] - back]

    @rule(slot=SLOTS, back=st.integers(0, 5))
    def unpin(self, slot: int, back: int) -> None:
        self.vault.unpin(slot, self.steps[slot] - back)
        self.pinned.pop((slot, self.steps[slot] - back), None)

    # --- peers ---

    @rule(target=writers, slot=SLOTS, sizes=SIZES, ahead=st.integers(-1, 2), late=st.booleans())
    def begin_replica(
        self, slot: int, sizes: tuple[int, int], ahead: int, late: bool
    ) -> MultipleResults[tuple[ReplicaWriter, bytes]] | tuple[ReplicaWriter, bytes]:
        step = max(0, self.steps[slot] + ahead)
        version = self.name(slot, step, sizes, max(1, self.generation - int(late)))
        try:
            writer = self.vault.begin_replica(version)
        except Fenced:
            assert version.generation < self.generation
            return multiple()
        except ProtocolError:
            return multiple()
        assert version.generation == self.generation
        return writer, self.fresh(sizes[1])

    @rule(pair=consumes(writers), good=st.booleans())
    def end_replica(self, pair: tuple[ReplicaWriter, bytes], good: bool) -> None:
        writer, data = pair
        writer.view[:] = data
        alive = writer.section.generation >= self.generation and not writer.dead
        if not good:
            writer.abandon()
            return
        try:
            writer.commit(checksums(memoryview(data)))
        except Fenced:
            assert not alive
            return
        assert alive
        self.appear(REPLICA, writer.section, data)

    @rule(target=adoptions, slot=SLOTS, sizes=SIZES)
    def begin_adoption(
        self, slot: int, sizes: tuple[int, int]
    ) -> MultipleResults[tuple[Adoption, bytes]] | tuple[Adoption, bytes]:
        try:
            adoption = self.vault.begin_adoption(self.name(slot, self.steps[slot], sizes))
        except (UsageError, LayoutMismatch):
            return multiple()
        except PeerUnreachable:
            assert slot in self.adopting
            return multiple()
        self.adopting.append(slot)
        return adoption, self.fresh(sum(sizes))

    @rule(pair=consumes(adoptions), good=st.booleans())
    def end_adoption(self, pair: tuple[Adoption, bytes], good: bool) -> None:
        adoption, data = pair
        self.adopting.remove(adoption.section.owner)
        shared = adoption.section.shared_nbytes
        adoption.shared[:] = data[:shared]
        adoption.unique[:] = data[shared:]
        if not good:
            adoption.abandon()
            return
        dead = bool(adoption.dead)
        try:
            where = adoption.commit()
        except Fenced:
            assert dead
            return
        assert adoption.section.generation == self.generation
        self.appear(OWN, adoption.section, data)
        file = self.vault.granted(where.slot)[where.buffer]
        assert bytes(file.view()[: len(data)]) == data

    @rule(target=leases, slot=SLOTS, back=st.integers(0, 2), kind=st.sampled_from(HeldKind))
    def open(self, slot: int, back: int, kind: HeldKind) -> MultipleResults[Opened] | Opened:
        try:
            lease = self.vault.open(slot, self.steps[slot] - back, UNIQUE, kind)
        except NotHeld:
            return multiple()
        return lease, kind, bytes(lease.view)

    @rule(entry=consumes(leases))
    def close_lease(self, entry: Opened) -> None:
        lease, kind, seen = entry
        # A worker may write over an old own snapshot at any time; a replica stays as it is while somebody reads it.
        if kind is REPLICA or lease.intact:
            assert bytes(lease.view) == seen
        lease.close()

    # --- the coordinator ---

    @rule()
    def fence(self) -> None:
        self.generation += 1
        self.vault.fence(self.generation)

    @rule(slot=SLOTS, back=st.integers(0, 2))
    def roll_back(self, slot: int, back: int) -> None:
        self.fence()
        self.steps[slot] = max(0, self.steps[slot] - back)
        self.vault.truncate(slot, self.steps[slot], before=self.generation)
        there = {(item.kind, item.slot, item.step) for item in self.vault.inventory()}
        for kind in HeldKind:
            steps = [step for (k, s, step) in self.visible if (k, s) == (kind, slot)]
            # Only the newest was promised: what is older than one that is undone may have been written over.
            undone = bool(steps) and max(steps) > self.steps[slot]
            for step in steps:
                if step > self.steps[slot] or (undone and (kind, slot, step) not in there):
                    del self.visible[kind, slot, step]

    @rule(slot=SLOTS, kind=st.sampled_from([OWN, REPLICA]))
    def forget(self, slot: int, kind: HeldKind) -> None:
        self.vault.forget(slot, kind)
        for key in list(self.visible):
            if key[:2] == (kind, slot):
                del self.visible[key]

    @rule(slot=SLOTS, back=st.integers(0, 3))
    def keep(self, slot: int, back: int) -> None:
        self.kept = max(0, self.steps[slot] - back)
        self.vault.keep((self.kept,))

    @rule(slot=SLOTS, kind=st.sampled_from([OWN, REPLICA]))
    def move(self, slot: int, kind: HeldKind) -> None:
        """All goes but what is kept, which stays whatever is moved, reserved and forgotten for a spare afterwards."""
        before = {item.step for item in self.vault.inventory() if (item.kind, item.slot) == (kind, slot)}
        self.vault.forget_moved(slot, kind, since=self.generation)
        after = {item.step for item in self.vault.inventory() if (item.kind, item.slot) == (kind, slot)}
        assert after == before & {self.kept}
        for key in list(self.visible):
            if key[:2] == (kind, slot) and key[2] not in after:
                del self.visible[key]

    @rule(slot=SLOTS)
    def forget_empty(self, slot: int) -> None:
        before = self.vault.inventory()
        self.vault.forget_empty(slot)
        assert self.vault.inventory() == before

    # --- what must always hold ---

    @invariant()
    def what_is_visible_was_made_visible_and_has_its_bytes(self) -> None:
        for item in self.vault.inventory():
            version, data = self.visible[item.kind, item.slot, item.step]
            assert (item.shared_nbytes, item.unique_nbytes) == (version.shared_nbytes, version.unique_nbytes)
            with self.vault.open(item.slot, item.step, UNIQUE, item.kind) as lease:
                assert lease.section == version
                assert bytes(lease.view) == (data[version.shared_nbytes :] if item.kind is OWN else data)
            if item.kind is OWN:
                with self.vault.open(item.slot, item.step, SHARED, OWN) as lease:
                    assert bytes(lease.view) == data[: version.shared_nbytes]

    @invariant()
    def the_newest_version_is_never_lost(self) -> None:
        there = {(item.kind, item.slot, item.step) for item in self.vault.inventory()}
        for kind in HeldKind:
            for slot in range(3):
                steps = [step for (k, s, step) in self.visible if (k, s) == (kind, slot)]
                if steps:
                    assert (kind, slot, max(steps)) in there

    @invariant()
    def a_pinned_snapshot_is_there_until_it_is_undone_or_forgotten(self) -> None:
        for (slot, step), pinned in self.pinned.items():
            if self.visible.get((OWN, slot, step)) == pinned:
                with self.vault.open(slot, step, UNIQUE, OWN) as lease:
                    assert lease.section == pinned[0]

    @invariant()
    def no_more_replicas_than_configured_are_visible(self) -> None:
        for slot in range(3):
            found = [item.step for item in self.vault.inventory() if (item.kind, item.slot) == (REPLICA, slot)]
            # And one that is kept, or was until another one was: it makes room for the next.
            assert len(found) <= 2 + (self.kept is not None)

    @invariant()
    def a_buffer_can_always_be_had(self) -> None:
        for slot in range(3):
            granted = self.vault.granted(slot)
            if granted:
                assert 0 <= self.vault.next_buffer(slot) < len(granted)

    def teardown(self) -> None:
        self.vault.close()


VaultMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestVault = VaultMachine.TestCase
