"""The agent's memory: own snapshots of slots that live on this node, and replicas for slots that live elsewhere.

What makes a version visible and what ends a generation exclude each other: both happen under one lock. So after
``fence(g)`` returns, nothing that belongs to a generation below *g* will ever be seen, however far its writer had got.

Which buffer of a slot is written next: never a pinned one, never the one with the newest complete version; of the rest
an empty one, else the oldest. With two buffers the version before the newest is therefore overwritten, but only by a
worker that has passed the commit gate of the newest, which proves that nobody will go back further. Each pin needs one
buffer more, and so does the state that was found equal to that of peers last, which ``keep`` names.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from itertools import chain

from hotswap.core.types import Generation, Held, HeldKind, Slot, Step
from hotswap.errors import Fenced, PeerUnreachable, ProtocolError, UsageError
from hotswap.replication.buffers import (
    Budget,
    Buffer,
    Located,
    age,
    clear,
    describe,
    locate,
    newest,
    require_progress,
    require_room,
    supersede,
    with_step,
)
from hotswap.replication.handles import Adoption, Lease, ReplicaWriter, Writer
from hotswap.replication.memory import MemoryFile
from hotswap.replication.sections import NotHeld, SectionId, SectionKind

BUFFERS_MIN = 2
WRITER_EXIT_S = 10.0
"""How long a new adoption waits for an interrupted one to let go of the buffer."""


class Vault:
    """Thread-safe. Locks are held for bookkeeping only, never while memory is allocated, copied or sent."""

    def __init__(self, *, replica_versions: int = 2, where: str = "in this node's memory") -> None:
        """*replica_versions*: how many of the newest versions are kept for each owner. *where* is used in messages."""
        assert replica_versions >= BUFFERS_MIN, f"replica_versions {replica_versions}: one alone would be overwritten"
        self._replica_versions = replica_versions
        self._where = where
        self._lock = threading.Condition(threading.Lock())
        self._budget = Budget()
        self._fence: Generation = 0
        self._kept: frozenset[Step] = frozenset()
        self._granted: dict[Slot, list[Buffer]] = {}
        self._superseded: dict[Slot, list[Buffer]] = {}
        self._replicas: dict[Slot, list[Buffer]] = {}
        self._writers: dict[tuple[HeldKind, Slot], Writer] = {}
        self._pins: dict[tuple[Slot, Step], Buffer] = {}

    # --- own snapshots -----------------------------------------------------------------------------------------

    def reserve(self, slot: Slot, nbytes: int, buffers: int) -> list[MemoryFile]:
        """Memory for *buffers* versions of *nbytes* bytes each, for the worker of *slot* to map.

        What is already there is granted again, contents included, if it is large enough: that is how a respawned
        worker finds its predecessor's snapshots. Otherwise new memory takes its place, and complete snapshots in the
        old one stay readable until newer ones supersede them. UsageError if memory is short.
        """
        if buffers < BUFFERS_MIN:
            raise UsageError(f"{buffers} snapshot buffer for slot {slot}: {BUFFERS_MIN} are needed, one may be torn")
        with self._lock:
            present = list(self._granted.get(slot, ()))
        kept = present if all(buffer.memory.nbytes >= nbytes for buffer in present) else []
        size = max((buffer.memory.nbytes for buffer in kept), default=nbytes)
        added = self._budget.create(f"hotswap snapshot {slot}", size, max(0, buffers - len(kept)))
        with self._lock:
            self._granted[slot] = kept + added
            if not kept:
                self._superseded.setdefault(slot, []).extend(present)
                self._kill_writer(HeldKind.OWN, slot, "its memory was replaced by larger one")
                self._retire(present)
                self._sweep(slot)
            return [buffer.memory for buffer in self._granted[slot]]

    def granted(self, slot: Slot) -> list[MemoryFile]:
        """The memory files of *slot* in the order of their indices, none if nothing is reserved."""
        with self._lock:
            return [buffer.memory for buffer in self._granted.get(slot, ())]

    def next_buffer(self, slot: Slot) -> int:
        """Index of the buffer that the worker of *slot* may overwrite next; the rule is in the module's docstring."""
        with self._lock:
            return self._next_buffer(slot)

    def _next_buffer(self, slot: Slot) -> int:
        buffers = self._granted_to(slot)
        keep = newest(buffers)
        free = [index for index, buffer in enumerate(buffers) if not buffer.pins and buffer is not keep]
        assert free, f"slot {slot}: {len(buffers)} buffers, {sum(1 for b in buffers if b.pins)} pinned, none free"
        # While there is a choice, not one that an interrupted adoption still writes to or that somebody reads.
        return min(
            free,
            key=lambda i: (self._is_kept(buffers[i]), buffers[i].writing, age(buffers[i]), buffers[i].readers, i),
        )

    def keep(self, steps: Collection[Step]) -> None:
        """Versions of *steps*, of all slots, stay while there is another buffer to write to. One call replaces the other."""
        with self._lock:
            self._kept = frozenset(steps)

    def _is_kept(self, buffer: Buffer) -> bool:
        return buffer.content is not None and buffer.content.step in self._kept

    def snapshot_begin(self, slot: Slot, buffer: int) -> None:
        """The worker is about to write to *buffer*: what was in it no longer counts."""
        with self._lock:
            entry = self._entry(slot, buffer)
            self._kill_writer(HeldKind.OWN, slot, "the slot's worker goes on without it")
            clear(entry)

    def snapshot_complete(
        self, slot: Slot, *, generation: Generation, step: Step, buffer: int, shared_nbytes: int, unique_nbytes: int
    ) -> SectionId:
        """The worker has finished the snapshot of *step* in *buffer*. Fenced, and void, if its generation is over."""
        section = SectionId(
            owner=slot, step=step, generation=generation, shared_nbytes=shared_nbytes, unique_nbytes=unique_nbytes
        )
        with self._lock:
            entry = self._entry(slot, buffer)
            require_room(entry, section)
            if entry.writing:
                raise ProtocolError(f"the snapshot of {section} shares its buffer with a restore that has not ended")
            if generation < self._fence:
                clear(entry)
                raise self._fenced(section)
            self._publish_own(entry, section, None)
        return section

    def _publish_own(self, entry: Buffer, section: SectionId, unique_checksums: tuple[int, ...] | None) -> None:
        slot = section.owner
        supersede(self._own_buffers(slot), entry, section)
        entry.content, entry.checksums = section, unique_checksums
        self._sweep(slot)

    def find(self, slot: Slot, step: Step) -> Located | None:
        """Where the worker of *slot* finds its own complete snapshot of *step*, if that is in memory granted to it."""
        with self._lock:
            return self._find(slot, step)

    def _find(self, slot: Slot, step: Step) -> Located | None:
        buffers = self._granted.get(slot, [])
        entry = with_step(buffers, step)
        return None if entry is None or entry.content is None else locate(buffers.index(entry), entry.content)

    def pin(self, slot: Slot, step: Step) -> Located:
        """Keep the buffer with the own snapshot of *step* from being overwritten until ``unpin``.

        NotHeld if there is no such snapshot; UsageError if too few buffers would be left to go on with.
        """
        with self._lock:
            buffers = self._granted_to(slot)
            found = self._find(slot, step)
            if found is None:
                raise NotHeld(f"no own snapshot of slot {slot} at step {step} {self._where}")
            entry = buffers[found.buffer]
            left = sum(1 for buffer in buffers if not buffer.pins and buffer is not entry)
            # What is kept must not be all that there is to write to.
            if left < BUFFERS_MIN + bool(self._kept):
                raise UsageError(f"a pin on step {step} of slot {slot} leaves {left} of {len(buffers)}: reserve more")
            if (slot, step) not in self._pins:
                self._pins[slot, step] = entry
                entry.pins += 1
            return found

    def unpin(self, slot: Slot, step: Step) -> None:
        """Undo ``pin``; harmless if nothing is pinned."""
        with self._lock:
            entry = self._pins.pop((slot, step), None)
            if entry is not None:
                entry.pins -= 1
                self._sweep(slot)
                self._close_if_spent(entry)

    def begin_adoption(self, section: SectionId) -> Adoption:
        """Start to put together an own snapshot of ``section.owner``, a slot that has come to this node.

        It goes into the next free buffer that the slot's worker was granted. ``section.generation`` is the present one.
        """
        with self._lock:
            self._require_current(section)
            self._kill_writer(HeldKind.OWN, section.owner, "a later attempt has begun")
            # Two threads that write to one buffer would void each other's checksums.
            buffers = self._granted_to(section.owner)
            if not self._lock.wait_for(lambda: not any(buffer.writing for buffer in buffers), WRITER_EXIT_S):
                raise PeerUnreachable(f"an interrupted restore of slot {section.owner} did not end")
            self._require_current(section)
            entry = self._entry(section.owner, self._next_buffer(section.owner))
            require_room(entry, section)
            clear(entry)
            entry.writing = True
            adoption = Adoption(
                section=section, where=self._where, buffer=entry, publish=self._publish, withdraw=self._withdraw
            )
            self._enter(adoption)
        return adoption

    def kept_nbytes(self, slot: Slot) -> int:
        """Size of the memory, no longer granted, that own snapshots of *slot* are still in; 0 if there are none."""
        with self._lock:
            return max((buffer.memory.nbytes for buffer in self._superseded.get(slot, ())), default=0)

    # --- replicas ----------------------------------------------------------------------------------------------

    def begin_replica(self, section: SectionId) -> ReplicaWriter:
        """Start to receive a replica. The newest complete version stays; the oldest makes room if there are enough.

        Fenced if its generation is over, ProtocolError if a newer step of the same generation is already here,
        UsageError if memory is short. An unfinished earlier attempt for the same owner is given up.
        """
        with self._lock:
            self._require_current(section)
            buffers = self._replicas.setdefault(section.owner, [])
            require_progress(buffers, section)
            entry = self._free_replica_buffer(buffers, section)
        if entry is None:
            entry = self._budget.create(f"hotswap replica {section.owner}", section.unique_nbytes, 1)[0]
            entry.writing = True
            with self._lock:
                self._replicas.setdefault(section.owner, []).append(entry)
        writer = ReplicaWriter(
            section=section, where=self._where, buffer=entry, publish=self._publish, withdraw=self._withdraw
        )
        with self._lock:
            self._enter(writer)
        if writer.dead:
            writer.abandon()
            writer.require_alive()
        return writer

    def _free_replica_buffer(self, buffers: list[Buffer], section: SectionId) -> Buffer | None:
        """A free buffer that is large enough, after evicting the oldest versions beyond the limit; None: make one."""
        # The version that this one replaces goes when this one is complete; it doesn't count as another.
        others = sorted((b for b in buffers if b.content is not None and b.content.step != section.step), key=age)
        kept = [buffer for buffer in others if self._is_kept(buffer)]
        surplus = len(others) - (self._replica_versions - 1) - bool(kept)
        for buffer in [buffer for buffer in others if buffer not in kept][: max(0, surplus)]:
            clear(buffer)
        for buffer in list(buffers):
            if buffer.idle and buffer.memory.nbytes < section.unique_nbytes:
                self._drop(buffers, buffer)
        free = next((buffer for buffer in buffers if buffer.idle), None)
        if free is not None:
            free.writing = True
        return free

    # --- reading -----------------------------------------------------------------------------------------------

    def open(self, owner: Slot, step: Step, kind: SectionKind, held: HeldKind | None = None) -> Lease:
        """Read one section: a shared one from an own snapshot, a unique one from a replica or else an own snapshot.

        *held* restricts where to look. NotHeld if it is not there.
        """
        places = [HeldKind.OWN] if kind is SectionKind.SHARED else [HeldKind.REPLICA, HeldKind.OWN]
        with self._lock:
            for place in places if held is None else [place for place in places if place is held]:
                buffers = self._own_buffers(owner) if place is HeldKind.OWN else self._replicas.get(owner, [])
                found = with_step(buffers, step)
                if found is not None:
                    return self._lease(found, kind, place)
        raise NotHeld(f"no {kind.value} section of slot {owner} at step {step} {self._where}")

    def _lease(self, entry: Buffer, kind: SectionKind, place: HeldKind) -> Lease:
        assert entry.content is not None, "only complete versions are read"
        entry.readers += 1
        offset = entry.content.offset(kind) if place is HeldKind.OWN else 0
        return Lease(entry, entry.content, kind, offset, self._release_reader)

    def _release_reader(self, entry: Buffer) -> None:
        with self._lock:
            entry.readers -= 1
            self._close_if_spent(entry)

    def inventory(self) -> tuple[Held, ...]:
        """Every complete version in this memory, in order of kind, slot and step."""
        with self._lock:
            owners = {*self._granted, *self._superseded}
            own = [(HeldKind.OWN, b.content) for slot in owners for b in self._own_buffers(slot)]
            replicas = [(HeldKind.REPLICA, b.content) for b in chain.from_iterable(self._replicas.values())]
        found = [describe(kind, content) for kind, content in own + replicas if content is not None]
        return tuple(sorted(found, key=lambda item: (item.kind.value, item.slot, item.step)))

    # --- fencing, rolling back, forgetting ---------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        """The newest fence."""
        with self._lock:
            return self._fence

    def fence(self, generation: Generation) -> None:
        """End all generations below *generation*: nothing of theirs becomes visible. An older fence changes nothing."""
        with self._lock:
            if generation <= self._fence:
                return
            self._fence = generation
            stale = [key for key, writer in self._writers.items() if writer.section.generation < generation]
            for kind, slot in stale:
                self._kill_writer(kind, slot, f"generation {generation} began")

    def truncate(self, slot: Slot, step: Step, *, before: Generation) -> None:
        """Drop everything of *slot* that is newer than *step* and from before generation *before*: its future was undone.

        Otherwise a step that is done again could later be mixed with the one that was undone. What is of that generation
        has been done again already: the order to drop may come later than replicas of the generation that it begins.
        """
        with self._lock:
            for buffer in chain(self._own_buffers(slot), self._replicas.get(slot, ())):
                content = buffer.content
                if content is not None and content.step > step and content.generation < before:
                    clear(buffer)
            self._sweep(slot)

    def forget_moved(self, slot: Slot, kind: HeldKind, *, since: Generation) -> None:
        """Forget what has moved in generation *since*, but for what is kept, unless something later is there: news may come late."""
        with self._lock:
            buffers = list(self._own_buffers(slot) if kind is HeldKind.OWN else self._replicas.get(slot, ()))
            if any(buffer.content is not None and buffer.content.generation > since for buffer in buffers):
                return
            self._kill_writer(kind, slot, "the slot has moved")
            kept = [buffer for buffer in buffers if self._is_kept(buffer)]
            if kind is HeldKind.REPLICA:
                self._replicas[slot] = kept
            else:
                # Memory in which nothing is was reserved since, for a worker that may need it.
                if any(buffer.content is not None for buffer in self._granted.get(slot, ())):
                    del self._granted[slot]
                self._superseded[slot] = kept
                self._retire(kept)
            granted = self._granted.get(slot, ())
            self._discard([buffer for buffer in buffers if buffer not in kept and buffer not in granted])

    def forget_empty(self, slot: Slot) -> None:
        """Free memory that was reserved for *slot* and never filled: the spare that wanted it has another position now."""
        with self._lock:
            granted = self._granted.get(slot, [])
            if not any(buffer.content is not None or buffer.writing for buffer in granted):
                self._discard(self._granted.pop(slot, []))

    def forget(self, slot: Slot, kind: HeldKind | None = None) -> None:
        """Drop what is held of *slot* and free its memory: it lives elsewhere, or has another holder. None: both.

        Memory that a reader, a writer or the durable-checkpoint writer still uses is freed when they are done.
        """
        with self._lock:
            if kind is not HeldKind.REPLICA:
                self._kill_writer(HeldKind.OWN, slot, "the slot was forgotten")
                self._discard([*self._granted.pop(slot, ()), *self._superseded.pop(slot, ())])
            if kind is not HeldKind.OWN:
                self._kill_writer(HeldKind.REPLICA, slot, "the owner was forgotten")
                self._discard(self._replicas.pop(slot, []))

    def forget_all(self) -> None:
        """Drop everything."""
        with self._lock:
            slots = {*self._granted, *self._superseded, *self._replicas}
        for slot in slots:
            self.forget(slot)

    @property
    def bytes_reserved(self) -> int:
        """Bytes of memory in use now."""
        return self._budget.bytes_reserved

    @property
    def bytes_peak(self) -> int:
        """The most bytes ever in use at once."""
        return self._budget.bytes_peak

    def close(self) -> None:
        """Forget everything, pinned or not."""
        with self._lock:
            for entry in self._pins.values():
                entry.pins -= 1
                self._close_if_spent(entry)
            self._pins.clear()
        self.forget_all()

    # --- writers -----------------------------------------------------------------------------------------------

    def _enter(self, writer: Writer) -> None:
        """Register *writer*, under the lock; the one it replaces is dead."""
        section, kind = writer.section, _kind(writer)
        if section.generation < self._fence:
            writer.kill(f"generation {self._fence} began")
            return
        self._kill_writer(kind, section.owner, "a later attempt has begun")
        self._writers[kind, section.owner] = writer

    def _kill_writer(self, kind: HeldKind, slot: Slot, why: str) -> None:
        writer = self._writers.pop((kind, slot), None)
        if writer is not None:
            writer.kill(why)

    def _publish(self, writer: Writer, found: tuple[int, ...] | None) -> Located | None:
        section = writer.section
        with self._lock:
            writer.require_alive()
            assert section.generation >= self._fence, f"{section} is behind fence {self._fence}, yet its writer lives"
            if isinstance(writer, Adoption):
                self._publish_own(writer.buffer, section, found)
                return self._find(section.owner, section.step)
            supersede(self._replicas[section.owner], writer.buffer, section)
            writer.buffer.content, writer.buffer.checksums = section, found
            return None

    def _withdraw(self, writer: Writer) -> None:
        with self._lock:
            if writer.ended:
                return
            writer.ended = True
            writer.kill("it has ended")
            writer.buffer.writing = False
            kind, owner = _kind(writer), writer.section.owner
            if self._writers.get((kind, owner)) is writer:
                del self._writers[kind, owner]
            self._close_if_spent(writer.buffer)
            if kind is HeldKind.REPLICA:
                self._trim_replicas(self._replicas.get(owner, []))
            self._lock.notify_all()

    def _trim_replicas(self, buffers: list[Buffer]) -> None:
        """Free what is beyond the configured number of versions, such as the buffer an interrupted writer had."""
        spare = [buffer for buffer in buffers if buffer.idle]
        wanted = self._replica_versions + any(map(self._is_kept, buffers))
        for buffer in spare[: max(0, len(buffers) - wanted)]:
            self._drop(buffers, buffer)

    # --- buffers, under the lock -------------------------------------------------------------------------------

    def _own_buffers(self, slot: Slot) -> Iterator[Buffer]:
        return chain(self._granted.get(slot, ()), self._superseded.get(slot, ()))

    def _granted_to(self, slot: Slot) -> list[Buffer]:
        buffers = self._granted.get(slot)
        if not buffers:
            raise UsageError(f"slot {slot} has no snapshot memory {self._where}: its worker must reserve some first")
        return buffers

    def _entry(self, slot: Slot, index: int) -> Buffer:
        buffers = self._granted_to(slot)
        if not 0 <= index < len(buffers):
            raise ProtocolError(f"slot {slot} names buffer {index} of {len(buffers)}")
        return buffers[index]

    def _sweep(self, slot: Slot) -> None:
        """Let go of replaced memory once as many newer versions are complete as are kept."""
        replaced = self._superseded.get(slot, [])
        ages = sorted((age(b) for b in self._own_buffers(slot) if b.content is not None), reverse=True)
        for buffer in list(replaced):
            if age(buffer) not in ages[:BUFFERS_MIN] and not self._is_kept(buffer) and not buffer.pins:
                clear(buffer)
                self._close_if_spent(buffer)
            if buffer.memory.closed:
                replaced.remove(buffer)

    def _discard(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            clear(buffer)
        self._retire(buffers)

    def _drop(self, buffers: list[Buffer], buffer: Buffer) -> None:
        buffers.remove(buffer)
        self._retire([buffer])

    def _retire(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            buffer.retired = True
            self._close_if_spent(buffer)

    def _close_if_spent(self, buffer: Buffer) -> None:
        if buffer.retired and buffer.idle:
            self._budget.close(buffer)

    def _require_current(self, section: SectionId) -> None:
        if section.generation < self._fence:
            raise self._fenced(section)

    def _fenced(self, section: SectionId) -> Fenced:
        return Fenced(f"the copy of {section} comes too late: generation {self._fence} has begun {self._where}")


def _kind(writer: Writer) -> HeldKind:
    return HeldKind.OWN if isinstance(writer, Adoption) else HeldKind.REPLICA
