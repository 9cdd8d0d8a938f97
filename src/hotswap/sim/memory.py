"""One node's memory: the real vault and the real keeper, on memory that is a few bytes, over transfers that take virtual time.

A snapshot is ``[shared section | unique section]``, as in production; here each says of which step and history it is.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotswap.config import AgentConfig
from hotswap.core.types import Endpoint, Generation, HeldKind, NodeId, Slot, Source, Step
from hotswap.errors import IntegrityError, LayoutMismatch, PeerUnreachable
from hotswap.node.checkpoints import CHECKPOINTS_KEPT, Checkpoints
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.replication.buffers import Budget, Buffer, Located, newest
from hotswap.replication.handles import Writer
from hotswap.replication.memory import MemoryFile
from hotswap.replication.sections import SectionId, SectionKind, checksums, require_equal
from hotswap.replication.vault import Vault
from hotswap.sim.chronicle import State, Violation
from hotswap.wire.worker_messages import SnapshotDone

if TYPE_CHECKING:
    from hotswap.sim.node import NodeModel

PROGRESS_S = 10.0
"""Longest time without a byte, as in production."""
SHARED = struct.Struct("<qq")
UNIQUE = struct.Struct("<qqqq")
GARBAGE = b"\xff"
GROWN = 16
"""Bytes that appear with the first update, as an optimizer's state does."""


class MemoryModel(MemoryFile):
    """A memory file without a kernel. ``fd`` names it."""

    def __init__(self, number: int, nbytes: int) -> None:
        """*number*: unique in the world."""
        super().__init__(number, nbytes)
        self.content = bytearray(nbytes)
        self._is_closed = False

    @property
    def closed(self) -> bool:
        """Whether the agent has let go of it."""
        return self._is_closed

    def view(self, *, populate: bool = False) -> memoryview:
        """All the bytes."""
        return memoryview(self.content)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Copy the bytes from *offset* on to *view*."""
        view[:] = self.view()[offset : offset + len(view)]

    def close(self) -> None:
        """Let go of it; a worker that has mapped it keeps it."""
        self._is_closed = True


def snapshot_nbytes(step: Step, *, shared: bool) -> tuple[int, int]:
    """Lengths of both sections of a snapshot of *step*."""
    return (SHARED.size if shared else 0), UNIQUE.size + (GROWN if step else 0)


def write_state(memory: MemoryModel, state: State, done: SnapshotDone) -> None:
    """A worker's snapshot of *state*, as it will announce it."""
    shared = SHARED.pack(state.step, state.history) if done.shared_nbytes else b""
    unique = UNIQUE.pack(state.step, state.history, state.position, done.generation).ljust(done.unique_nbytes, b"\0")
    memory.content[: len(shared) + len(unique)] = shared + unique


def spoil(memory: MemoryModel) -> None:
    """What memory holds while it is written to."""
    memory.content[:] = GARBAGE * len(memory.content)


def read_unique(data: bytes | memoryview) -> State:
    """The state that a unique section is of."""
    step, history, position, _ = UNIQUE.unpack_from(data)
    return State(step=step, history=history, position=position)


def read_generation(memory: MemoryModel, shared_nbytes: int) -> int:
    """The generation that a snapshot was made in."""
    return int(UNIQUE.unpack_from(memory.content, shared_nbytes)[3])


def read_state(memory: MemoryModel, shared_nbytes: int) -> State:
    """The state in a snapshot. Violation if its sections are not of the same step and history."""
    state = read_unique(memory.view()[shared_nbytes:])
    if shared_nbytes and SHARED.unpack_from(memory.content) != (state.step, state.history):
        raise Violation(f"a snapshot is put together from {SHARED.unpack_from(memory.content)} and {state}")
    return state


class BudgetModel(Budget):
    """Makes memory out of nothing."""

    def __init__(self, make: Callable[[int], MemoryModel]) -> None:
        """*make*: of so many bytes."""
        super().__init__()
        self._make = make

    def create(self, name: str, nbytes: int, count: int) -> list[Buffer]:
        """New buffers."""
        return [Buffer(self._make(max(1, nbytes))) for _ in range(count)]


class OneVersionVault(Vault):
    """A mutant: every snapshot, and every replica, is written over the one before."""

    def _next_buffer(self, slot: Slot) -> int:
        return 0


class KeeperModel(MemoryKeeper):
    """Real, but for the way of bytes to other nodes and to storage."""

    def __init__(
        self,
        node: NodeModel,
        config: AgentConfig,
        name: NodeId,
        on_acked: Callable[[Slot, Generation, Step, int], None],
        on_stalled: Callable[[Slot, Generation, str], None],
        on_durable: Callable[[Slot, Step, Generation], None],
        on_committed: Callable[[Step], None],
    ) -> None:
        """As the agent calls it, apart from *node*."""
        super().__init__(config, name, on_acked, on_stalled, on_durable, on_committed)
        setup = node.job.setup
        self.model = node
        self.vault = (Vault if setup.versions > 1 else OneVersionVault)(where=f"in the memory of {node.id}")
        self.vault._replica_versions = setup.versions
        self.vault._budget = BudgetModel(node.job.make_memory)
        self.checkpoints = CheckpointsModel(
            node, config, self.vault, self._threads, self._start, on_durable, on_committed
        )
        self._waits: dict[asyncio.Future[None], None] = {}
        self._outgoing: dict[Writer, None] = {}
        self._client.interrupt = self._interrupt  # type: ignore[method-assign]

    def start(self) -> None:
        """Nothing to open."""

    @property
    def endpoint(self) -> Endpoint:
        """The host is the node."""
        return Endpoint(host=self.model.id, port=1)

    def undo_after(self, step: Step) -> None:
        """As in production, unless the world is spoilt."""
        if self.model.job.setup.drop_undone:
            super().undo_after(step)

    def forget_moved(self, slots: Collection[Slot]) -> None:
        """As in production, unless the world is spoilt: then what all agreed on last is freed as well."""
        if not self.model.job.setup.keep_agreed:
            self.vault.keep(())
        super().forget_moved(slots)

    def forget_all(self) -> None:
        """As in production, unless the world is spoilt."""
        if self.model.job.setup.drop_resized:
            super().forget_all()

    def _ended(self, task: asyncio.Task[None]) -> None:
        super()._ended(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.model.loop.fail(error)

    def _ack(self, slot: Slot, generation: Generation, step: Step) -> None:
        if not self._holders.get(slot):
            with self.vault.open(slot, step, SectionKind.UNIQUE, HeldKind.OWN) as lease:
                self.model.job.chronicle.stored_alone(slot, read_unique(lease.view), generation)
        super()._ack(slot, generation, step)

    def replicas(self, slots: Collection[Slot]) -> list[MemoryModel]:
        """Memory of the newest replica of each of *slots* that is here."""
        found = [newest(self.vault._replicas.get(slot, ())) for slot in slots]
        return [cast(MemoryModel, buffer.memory) for buffer in found if buffer is not None]

    async def _push_to_all(self, section: SectionId, holders: Collection[NodeId]) -> None:
        """As in production, unless the world is spoilt: then the first holder's word is enough."""
        first, rest = [*holders][:1], [*holders][1:]
        if rest and not self.model.job.setup.all_holders:
            holders = first
            self._start(self._push_late(section, rest))
        await super()._push_to_all(section, holders)

    async def _push_late(self, section: SectionId, holders: Collection[NodeId]) -> None:
        await asyncio.gather(*(self._push_until_acked(section, holder) for holder in holders))

    # --- transfers -------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """The generation has ended: whoever waits for a peer falls out of it."""
        waits, self._waits = self._waits, {}
        for wait in waits:
            if not wait.done():
                wait.set_exception(PeerUnreachable("interrupted"))

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        wait = loop.create_future()
        self._waits[wait] = None
        timer = loop.call_later(seconds, _resolve, wait)
        try:
            await wait
        finally:
            timer.cancel()
            self._waits.pop(wait, None)

    async def _way(self, host: NodeId, delay_s: float) -> KeeperModel:
        """To another host and back; its keeper. PeerUnreachable if there is no way, or nobody at its end."""
        job, here = self.model.job, self.model.id
        other = job.nodes[host]
        way_s = (
            max(job.network.open_at(here, host), job.network.open_at(host, here), other.loop.frozen_to) - job.world.now
        )
        if way_s > PROGRESS_S or other.silent:
            await self._sleep(PROGRESS_S)
            raise PeerUnreachable(f"{host}: no answer")
        await self._sleep(max(0.0, way_s) + delay_s)
        if not other.alive or job.world.chance(job.setup.flaky):
            raise PeerUnreachable(f"{host}: connection refused")
        return other.keeper

    async def _push(self, endpoint: Endpoint, section: SectionId) -> None:  # type: ignore[override]
        """A replica on its way. What a lost sender leaves half written is given up by the holder later (``lost``)."""
        job, host = self.model.job, endpoint.host
        job.moment("push")
        with self.vault.open(section.owner, section.step, SectionKind.UNIQUE, HeldKind.OWN) as lease:
            if lease.nbytes != section.unique_nbytes:
                raise LayoutMismatch(f"{lease.nbytes} bytes instead of {section.unique_nbytes}")
            holder = await self._way(host, job.between(job.setup.transfer_s) / 2)
            writer = holder.vault.begin_replica(section)
            self._outgoing[writer] = None
            try:
                half = lease.nbytes // 2
                writer.view[:half] = lease.view[:half]
                await self._way(host, job.between(job.setup.transfer_s) / 2)
                writer.view[half:] = lease.view[half:]
                if not lease.intact:
                    raise IntegrityError(f"{section} was overwritten while it was sent")
                sums, state = checksums(writer.view), read_unique(writer.view)
                writer.commit(sums)
            finally:
                del self._outgoing[writer]
                writer.abandon()
            job.chronicle.stored(section.owner, self.model.id, host, state)
            lease.remember(sums)
        await self._way(host, job.world.between(0.0005, 0.02))

    async def _fetch(  # type: ignore[override]
        self, slot: Slot, source: Source, step: Step, generation: Generation
    ) -> Located:
        section = SectionId(
            owner=slot,
            step=step,
            generation=generation,
            shared_nbytes=source.shared_nbytes,
            unique_nbytes=source.unique_nbytes,
        )
        while any(buffer.writing for buffer in self.vault._granted.get(slot, ())):
            await self._sleep(0.001)
        adoption = self.vault.begin_adoption(section)
        try:
            sums = await self._get(source.unique_from, slot, step, SectionKind.UNIQUE, adoption.unique)
            if section.shared_nbytes:
                await self._get(source.shared_from, source.shared_slot, step, SectionKind.SHARED, adoption.shared)
            return adoption.commit(sums)
        finally:
            adoption.abandon()

    async def _get(
        self, node: NodeId, slot: Slot, step: Step, kind: SectionKind, into: memoryview
    ) -> tuple[int, ...] | None:
        if node == self.model.id:
            return self._take(node, slot, step, kind, into)
        job = self.model.job
        keeper = await self._way(node, job.between(job.setup.transfer_s) / 2)
        with keeper.vault.open(slot, step, kind) as lease:
            half = lease.nbytes // 2
            into[:half] = lease.view[:half]
            await self._way(node, job.between(job.setup.transfer_s) / 2)
            into[half:] = lease.view[half:]
            if not lease.intact:
                raise IntegrityError(f"slot {slot} at step {step} on {node} was overwritten while it was fetched")
            if lease.checksums is not None and job.setup.checked:
                require_equal(checksums(into), lease.checksums, what=f"slot {slot} at step {step}", where=f"on {node}")
            return checksums(into)

    def lost(self) -> None:
        """This node is gone, and its peers have noticed: holders give up what it was sending."""
        for writer in self._outgoing:
            writer.abandon()


class CheckpointsModel(Checkpoints):
    """Real, but for the way of bytes to storage."""

    def __init__(self, node: NodeModel, *args: Any) -> None:
        """*args*: as the keeper gives them."""
        super().__init__(*args)
        self.model = node

    async def find(self) -> None:
        """What storage shows to this node."""
        if self._config.checkpoint_dir:
            self.step = self.model.job.storage.latest()

    async def _written_in(self, slot: Slot, step: Step) -> Generation:
        return self.model.job.storage.generation(step, slot)

    async def _commit(self, directory: Path, step: Step, generations: Mapping[Slot, Generation]) -> None:
        storage = self.model.job.storage
        try:
            await asyncio.sleep(storage.delay_s())
            storage.commit(step, generations)
            self._on_committed(step)
            await asyncio.sleep(storage.delay_s())
            storage.prune(CHECKPOINTS_KEPT)
        except OSError:
            self.model.job.world.note(f"{self.model.id}: no checkpoint of step {step}")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
