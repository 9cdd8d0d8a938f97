"""The agent's memory at work: announces, replicates and locates what its workers snapshot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core.messages import Plan
from hotswap.core.types import (
    Endpoint,
    Generation,
    Held,
    HeldKind,
    NodeId,
    Slot,
    Source,
    SourceKind,
    Step,
    Suspicion,
)
from hotswap.errors import Fenced, HotswapError, PeerFault, PeerUnreachable
from hotswap.node.agreement import Agreement
from hotswap.node.checkpoints import CallProcess, Checkpoints
from hotswap.replication.buffers import Located
from hotswap.replication.memory import MemoryFile
from hotswap.replication.sections import NotHeld, SectionId, SectionKind
from hotswap.replication.transfer import TransferClient, TransferServer
from hotswap.replication.vault import Vault
from hotswap.wire import worker_messages as w

log = logging.getLogger("hotswap.memory")
GROWTH = 1.25
"""Room beyond the adopted snapshot: the worker would otherwise reserve again as soon as its state grows."""
THREADS_MAX = 32
RETRY_S = 0.05


class MemoryKeeper:
    """Bookkeeping on the event loop's thread, bytes in a thread pool."""

    def __init__(
        self,
        config: AgentConfig,
        node: NodeId,
        on_acked: Callable[[Slot, Generation, Step, int], None],
        on_stalled: Callable[[Slot, Generation, str], None],
        on_durable: Callable[[Slot, Step, Generation], None],
        on_committed: Callable[[Step], None],
    ) -> None:
        """*on_acked*: slot, generation, step and the next free buffer, when a snapshot is complete in both places."""
        self._config = config
        self._node = node
        self._on_acked = on_acked
        self._on_stalled = on_stalled
        self.vault = Vault(where=f"in the memory of {node}")
        self.agreement = Agreement(self._keep)
        self.acked: dict[Slot, Step] = {}
        self.suspicion: Suspicion | None = None
        """What a comparison of states has found wrong since the last plan."""
        self.endpoints: dict[NodeId, Endpoint] = {}
        self._generation: Generation = 0
        self._holders: dict[Slot, tuple[NodeId, ...]] = {}
        self._mine: Collection[Slot] | None = None
        """This node's slots while it is certain that nobody needs what it has of others; None from a fence on."""
        self._server: TransferServer | None = None
        self._client = TransferClient(
            token=config.token, streams=config.transfer_streams, connect_s=config.timing.connect_s
        )
        self._pushing: set[tuple[Slot, Step, Generation]] = set()
        self._reserving: dict[Slot, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(max_workers=THREADS_MAX, thread_name_prefix="hotswap-transfer")
        self._tasks: set[asyncio.Task[None]] = set()
        self.checkpoints = Checkpoints(config, self.vault, self._threads, self._start, on_durable, on_committed)

    def start(self) -> None:
        """Open the data port."""
        self._server = TransferServer(self.vault, token=self._config.token, bind_host=self._config.bind_host)
        self._server.start()

    @property
    def endpoint(self) -> Endpoint:
        """Where other agents reach this node's memory."""
        assert self._server is not None
        return Endpoint(host=self._config.advertise_host, port=self._server.port)

    def close(self) -> None:
        """Free everything."""
        for task in self._tasks:
            task.cancel()
        self._client.close()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.vault.close()

    # --- snapshots -------------------------------------------------------------------------------------------------

    async def reserve(self, slot: Slot, nbytes: int, buffers: int) -> None:
        """Memory for a worker's snapshots. In a thread, for the kernel fills it with zeros first."""
        loop = asyncio.get_running_loop()
        async with self._reserving.setdefault(slot, asyncio.Lock()):
            await loop.run_in_executor(self._threads, self.vault.reserve, slot, nbytes, buffers)

    async def prepare(self, slot: Slot, source: Source, granted: list[MemoryFile]) -> None:
        """Memory for what *source* is going to bring, and for a worker that has mapped what this node has freed since.

        The latter was made a spare meanwhile; *granted* is what it has mapped. A slot that comes back to what is kept of it has none either,
        or what a rehearsal has reserved, which may be smaller.
        """
        if source.kind is SourceKind.REPLICA:
            await self.reserve(
                slot, int(GROWTH * (source.shared_nbytes + source.unique_nbytes)), self._config.snapshot_buffers
            )
            return
        present = self.vault.granted(slot)
        kept = self.vault.kept_nbytes(slot) if source.kind is SourceKind.OWN else 0
        nbytes = max([kept, *(file.nbytes for file in granted[:1])])
        if nbytes and (not present or present[0].nbytes < kept):
            await self.reserve(slot, nbytes, max(len(granted), self._config.snapshot_buffers))

    def buffers(self, slot: Slot) -> list[MemoryFile]:
        """The memory files the worker of *slot* writes to, in the order in which it numbers them."""
        return self.vault.granted(slot)

    def free(self, slot: Slot) -> int:
        """The buffer for the next snapshot of *slot*."""
        return self.vault.next_buffer(slot)

    def snapshot_begin(self, slot: Slot, buffer: int) -> None:
        """A buffer is about to be overwritten."""
        self.vault.snapshot_begin(slot, buffer)

    def snapshot_done(self, slot: Slot, done: w.SnapshotDone) -> None:
        """A snapshot is complete: make it count, and send it to the holders."""
        try:
            section = self.vault.snapshot_complete(
                slot,
                generation=done.generation,
                step=done.step,
                buffer=done.buffer,
                shared_nbytes=done.shared_nbytes,
                unique_nbytes=done.unique_nbytes,
            )
        except Fenced as error:
            log.info("slot %d: %s", slot, error)
            return
        self._replicate(section)

    def ensure_replicated(self, slot: Slot, step: Step, plan: Plan) -> None:
        """After a restore: the holders must have *step* again before anyone goes on."""
        if self.acked.get(slot) == step or (slot, step, plan.generation) in self._pushing:
            return
        if slot not in plan.push:
            self._ack(slot, plan.generation, step)
            return
        located = self.vault.find(slot, step)
        if located is not None:
            section = SectionId(
                owner=slot,
                step=step,
                generation=plan.generation,
                shared_nbytes=located.shared_nbytes,
                unique_nbytes=located.unique_nbytes,
            )
            self._replicate(section, plan.push[slot])

    def _replicate(self, section: SectionId, to: Collection[NodeId] | None = None) -> None:
        """Send it to *to*, or to all holders of its slot."""
        push = (section.owner, section.step, section.generation)
        self._pushing.add(push)
        # The holder of now: when the task begins, this generation may be over and its holders forgotten.
        holders = self._holders.get(section.owner, ()) if to is None else to
        task = self._start(self._push_to_all(section, holders))
        task.add_done_callback(lambda _: self._pushing.discard(push))

    async def _push_to_all(self, section: SectionId, holders: Collection[NodeId]) -> None:
        """Acknowledge it once it is complete at all holders: what counts as committed survives the loss of all but one."""
        done = await asyncio.gather(*(self._push_until_acked(section, holder) for holder in holders))
        if all(done) and section.generation == self._generation:
            self._ack(section.owner, section.generation, section.step)

    async def _push_until_acked(self, section: SectionId, holder: NodeId) -> bool:
        """Push until it is complete there or the generation ends; a long failure is reported, for it stops the gate."""
        slot, generation = section.owner, section.generation
        loop = asyncio.get_running_loop()
        began = loop.time()
        while generation == self._generation:
            endpoint = self.endpoints.get(holder)
            try:
                if endpoint is None:
                    raise PeerFault(f"the address of holder {holder} is unknown")
                await loop.run_in_executor(self._threads, self._push, endpoint, section)
                return True
            except (Fenced, NotHeld) as error:
                log.info("replica of slot %d at step %d: %s", slot, section.step, error)
                return False
            except HotswapError as error:
                if loop.time() - began > self._config.timing.detection_budget_s:
                    # Again and again: there may be no coordinator now, and the next one must hear of it.
                    began = loop.time()
                    self._on_stalled(
                        slot, generation, f"replica of slot {slot} at step {section.step} to {holder}: {error}"
                    )
            await asyncio.sleep(RETRY_S)
        return False

    def _push(self, endpoint: Endpoint, section: SectionId) -> None:
        deadline_s = self._config.timing.transfer_s(section.unique_nbytes)
        self._client.push(endpoint, self.vault, section, deadline_s=deadline_s)

    def _ack(self, slot: Slot, generation: Generation, step: Step) -> None:
        self.acked[slot] = max(step, self.acked.get(slot, -1))
        self._on_acked(slot, generation, step, self.vault.next_buffer(slot))

    def all_acked(self, step: Step, slots: Iterable[Slot]) -> bool:
        """Whether *step* of all *slots* is in two places."""
        return all(self.acked.get(slot, -1) >= step for slot in slots)

    def compared(self, slot: Slot, told: w.Compared, call: CallProcess) -> None:
        """Make what all agree on durable if that is asked for; remember it if somebody differs."""
        if told.odd or told.undecided:
            self.suspicion = Suspicion(verified=told.verified, odd=told.odd)
            return
        self.agreed(told.step)
        if told.durable:
            self.checkpoints.write(slot, told.step, told.generation, call)

    def _keep(self, steps: Collection[Step]) -> None:
        self.vault.keep(steps)

    def agreed(self, step: Step) -> None:
        """All slots agree on *step*: what was kept of slots that have moved, for the case that they don't, may go."""
        self.agreement.reached(step)
        self._free_moved()

    # --- recovery --------------------------------------------------------------------------------------------------

    def fence(self, generation: Generation) -> None:
        """End all older generations in this memory."""
        self._generation = generation
        self.acked.clear()
        self._holders, self._mine = {}, None
        self.vault.fence(generation)
        self.checkpoints.fence(generation)
        # A fetch of the old generation would otherwise go on until its peer's silence is noticed.
        self._client.interrupt()

    def forget_all(self) -> None:
        """The job has other slots from now on: nothing that is here is of any of them."""
        self.suspicion = None
        self.agreement.forget()
        self.vault.forget_all()

    def inventory(self) -> tuple[Held, ...]:
        """What is complete here."""
        return self.vault.inventory()

    def undo_after(self, step: Step) -> None:
        """Forget what belongs to a future that was undone while this node was away, and what was suspect in it."""
        self.suspicion = None
        self.agreement.undo_after(step)
        for item in self.vault.inventory():
            self.vault.truncate(item.slot, step, before=self._generation)

    def adopt_plan(self, plan: Plan) -> None:
        """Forget the undone future, and with it what was suspect."""
        self.suspicion = None
        self.agreement.undo_after(plan.resume_step)
        self._holders = dict(plan.holders)
        for item in self.vault.inventory():
            self.vault.truncate(item.slot, plan.resume_step, before=plan.generation)

    def forget_moved(self, slots: Collection[Slot]) -> None:
        """Free what other nodes have now; *slots* are this node's.

        Not before everybody is restored: it was a source until then, if only for the case that the planned one fails. What all
        agreed on last stays until they agree again: should they differ, there may be no other copy to go back to.
        """
        self._mine = frozenset(slots)
        self._free_moved()

    def _free_moved(self) -> None:
        if self._mine is None:
            return
        for item in self.vault.inventory():
            own = item.kind is HeldKind.OWN
            if item.slot not in self._mine if own else self._node not in self._holders.get(item.slot, ()):
                self.vault.forget_moved(item.slot, item.kind, since=self._generation)

    async def locate(self, slot: Slot, source: Source, step: Step) -> Located | None:
        """Bring the state of *step* into the memory prepared for *slot*; None when its worker needs none of it."""
        if source.kind in (SourceKind.FRESH, SourceKind.CHECKPOINT):
            return None
        loop = asyncio.get_running_loop()
        # The generation of now: what a thread finishes after a fence must not become valid in the next one.
        # A replica is planned although there may be an own copy when that one has failed before.
        if source.kind is SourceKind.REPLICA:
            return await self._fetch_patiently(slot, source, step, self._generation)
        located = self.vault.find(slot, step)
        if located is not None:
            return located
        return await loop.run_in_executor(self._threads, self._regrant, slot, step, self._generation)

    async def _fetch_patiently(self, slot: Slot, source: Source, step: Step, generation: Generation) -> Located:
        """A holder may be out of reach for a moment; whoever is so for longer than others may be silent is reported."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.timing.detection_budget_s
        while True:
            try:
                return await loop.run_in_executor(self._threads, self._fetch, slot, source, step, generation)
            except PeerUnreachable:
                if generation != self._generation or loop.time() >= end:
                    raise
            await asyncio.sleep(RETRY_S)

    def _fetch(self, slot: Slot, source: Source, step: Step, generation: Generation) -> Located:
        section = SectionId(
            owner=slot,
            step=step,
            generation=generation,
            shared_nbytes=source.shared_nbytes,
            unique_nbytes=source.unique_nbytes,
        )
        adoption = self.vault.begin_adoption(section)
        try:
            sums = self._take(source.unique_from, slot, step, SectionKind.UNIQUE, adoption.unique)
            if section.shared_nbytes:
                self._take(source.shared_from, source.shared_slot, step, SectionKind.SHARED, adoption.shared)
            return adoption.commit(sums)
        finally:
            adoption.abandon()

    def _take(
        self, node: NodeId, slot: Slot, step: Step, kind: SectionKind, into: memoryview
    ) -> tuple[int, ...] | None:
        """One section from another node's memory, or from this one's."""
        if node == self._node:
            with self.vault.open(slot, step, kind) as lease:
                lease.copy_to(into, f"on {node}", threads=self._config.transfer_streams)
                return lease.checksums
        endpoint = self.endpoints.get(node)
        if endpoint is None:
            raise PeerFault(f"the address of {node}, which holds slot {slot} at step {step}, is unknown")
        return self._client.fetch(
            endpoint, slot, step, kind, into, deadline_s=self._config.timing.transfer_s(len(into))
        )

    def _regrant(self, slot: Slot, step: Step, generation: Generation) -> Located | None:
        """The snapshot lies in memory that has been replaced by larger one: move it to where the worker can read it."""
        try:
            with self.vault.open(slot, step, SectionKind.UNIQUE, HeldKind.OWN) as unique:
                section = SectionId(
                    owner=slot,
                    step=step,
                    generation=generation,
                    shared_nbytes=unique.section.shared_nbytes,
                    unique_nbytes=unique.section.unique_nbytes,
                )
                adoption = self.vault.begin_adoption(section)
                try:
                    where, threads = f"on {self._node}", self._config.transfer_streams
                    unique.copy_to(adoption.unique, where, threads=threads)
                    with self.vault.open(slot, step, SectionKind.SHARED, HeldKind.OWN) as shared:
                        shared.copy_to(adoption.shared, where, threads=threads)
                    return adoption.commit(unique.checksums)
                finally:
                    adoption.abandon()
        except NotHeld:
            return None

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("replication task failed", exc_info=task.exception())
