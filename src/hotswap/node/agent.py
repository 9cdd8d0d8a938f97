"""The agent process: supervises the node's workers, owns snapshot and replica memory, speaks with the coordinator.

Reads its AgentConfig as JSON on standard input. One asyncio loop decides; memory transfers run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any, NoReturn

import msgspec

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.history import History
from hotswap.core.types import Generation, NodeId, Slot, Step, node_id
from hotswap.errors import EXIT_REQUEUE, EXIT_USAGE, AuthError, HotswapError
from hotswap.node.compared import heed
from hotswap.node.departure import Departure
from hotswap.node.fencing import FenceAnswer
from hotswap.node.forward import forwarded
from hotswap.node.hung import HungWorkers
from hotswap.node.loading import bring, reserve
from hotswap.node.parts import REAL, Parts
from hotswap.node.process import DRAIN_SIGNAL, die_with_parent, run_and_leave, set_up_logging
from hotswap.node.relay import RendezvousRelay
from hotswap.node.salvage import salvage
from hotswap.node.strikes import Strikes
from hotswap.node.worker_process import WorkerProcess
from hotswap.wire import worker_messages as w

log = logging.getLogger("hotswap.agent")
RESPAWNS_OF_A_SPARE_MAX = 3


class Agent:
    """One node. All methods run on the event loop's thread."""

    def __init__(self, config: AgentConfig, node: NodeId, parts: Parts = REAL) -> None:
        """Nothing is opened before ``run``."""
        self.config = config
        self.node = node
        self.generation: Generation = 0
        self.places: tuple[NodeId, ...] = ()
        self.training = False
        self.plan: m.Plan | None = None
        self.workers: dict[Slot, WorkerProcess] = {}
        self.memory = parts.memory(
            config, node, self._replicated, self._replication_stalled, self._durable, self._checkpoint_committed
        )
        self.pool = parts.pool(config, self._on_worker_message, self._on_worker_end, self._fail)
        self.control = parts.control(config, self._register, self._on_coordinator_message)
        self.rendezvous = RendezvousRelay(self.control.send, self._give)
        self._protected = self._leaving = False
        self._peers: dict[Slot, tuple[Slot, ...]] = {}
        self._lost: set[Slot] = set()
        self._finished: set[Slot] = set()
        self._spare_respawns = 0
        self._fence: m.Fence | None = None
        self._history = History()
        self._restored: dict[Slot, Step] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last_words = parts.last_words(node, self.control.send, config.kernel_log)
        self._check = parts.check(node, self.control.send)
        self._hung = HungWorkers(self.pool, self.control.send, config.timing.heartbeat_s)
        self._answer = FenceAnswer(
            config, node, self.memory, self.workers, self._finished, self.pool.kill, parts.reach, self.control.send
        )
        self._exit: asyncio.Future[int] | None = None
        self.departure = Departure(config, self.control.send, self._leave)
        self._strikes = Strikes(config, self.pool, self.workers, self.control.send, self.control.flush)

    async def run(self) -> int:
        """Serve until the coordinator says stop or a signal does."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, 128 + number)
        loop.add_signal_handler(DRAIN_SIGNAL, self.departure.begin, "signal")
        self.memory.start()
        try:
            await self.pool.start()
            await self.memory.checkpoints.find()
            self._spawn_task(self.control.run())
            self._spawn_task(self._beat())
            code = await self._exit
        finally:
            self._leaving = True
            await asyncio.gather(self._last_words.close(), self._check.close())
            await self.control.close()
            for task in self._tasks:
                task.cancel()
            await self.pool.close()
            self.memory.close()
        return code

    def _fail(self, error: BaseException) -> None:
        """Something of this node does not work any more: end it, a spare is better."""
        log.error("this node cannot go on: %s", error, exc_info=error)
        self._leave(EXIT_REQUEUE)

    def _leave(self, exit_code: int) -> None:
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(exit_code)

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AuthError):
            log.error("%s", error)
            self._leave(EXIT_USAGE)
        elif error is not None:
            self._fail(error)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def _register(self) -> m.Register:
        return m.Register(
            node=self.node,
            fault_domain=self.config.fault_domain,
            endpoint=self.memory.endpoint,
            generation=self.generation,
            places=self.places,
            planned=self.plan is not None,
            training=self.training,
            built=tuple(x.as_built(x.built) for x in self.workers.values() if x.built is not None and x.alive),
            acked=dict(self.memory.acked),
            lost=tuple(sorted(self._lost)),
            finished=tuple(sorted(self._finished)),
            checkpoint_step=self.memory.checkpoints.step,
            protected=self._protected,
            peers=dict(self._peers),
            leaves_in_s=self.departure.left_s,
            plans=self._history.plans,
            size_since=self._fence.size_since if self._fence is not None else 0,
        )

    async def _beat(self) -> None:
        heartbeat_s, loop = self.config.timing.heartbeat_s, asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(heartbeat_s)
            late_s = loop.time() - began - heartbeat_s
            if late_s > heartbeat_s:
                log.warning("this agent did not get to run for %.1f s", late_s)
            self._heartbeat()
            self._require_coordinator()
            self.pool.end_stopped()

    def _require_coordinator(self) -> None:
        """Training needs no coordinator, but workers that wait for one, or for peers, must not wait for ever."""
        now = asyncio.get_running_loop().time()
        moved_at = max((worker.moved_at for worker in self.workers.values() if self.training), default=0.0)
        lost_s = min(self.control.alone_s, now - moved_at)
        if lost_s > self.config.timing.coordinator_s:
            log.error("no coordinator and no progress for %.0f s; giving up, the job can be requeued", lost_s)
            self._leave(EXIT_REQUEUE)

    def _heartbeat(self) -> None:
        now = asyncio.get_running_loop().time()
        progress = {
            slot: said for slot, worker in self.workers.items() if (said := worker.progress(self.generation, now))
        }
        beat = m.Heartbeat(
            generation=self.generation, acked=dict(self.memory.acked), progress=progress, protected=self._protected
        )
        self.control.send(beat)

    def _on_coordinator_message(self, message: Any) -> None:
        if isinstance(message, m.Fence):
            self._on_fence(message)
        elif isinstance(message, m.Plan):
            self._on_plan(message)
        elif isinstance(message, m.Go):
            self._on_go(message)
        elif isinstance(message, m.EndHung):
            self._on_end_hung(message)
        elif isinstance(message, m.CheckNode):
            self._check.ask(message.reason)
        elif isinstance(message, m.Strike):
            self._spawn_task(self._strikes.obey(message))
        elif isinstance(message, m.KvValue):
            self.rendezvous.publish(message.generation, message.key, message.value)
        elif isinstance(message, m.Agreed):
            if message.generation == self.generation:
                self.memory.agreed(message.step)
        elif isinstance(message, m.CommitCheckpoint):
            self.memory.checkpoints.commit(message.step, message.generations)
        elif isinstance(message, m.Stop):
            self._on_stop(message)
        elif isinstance(message, m.Salvage):
            if message.generation == self.generation:
                self._spawn_task(salvage(message, self.memory, self.pool.call))
        else:
            self.departure.take(message, self.generation, self.workers.values())

    def _on_stop(self, message: m.Stop) -> None:
        log.info("stop: %s", message.reason)
        for worker in self.workers.values():
            worker.link.send(w.Finish(exit_code=message.exit_code, reason=message.reason))
        self._leave(message.exit_code)

    # --- fence -----------------------------------------------------------------------------------------------------

    def _on_fence(self, fence: m.Fence) -> None:
        if fence.generation < self.generation:
            return
        resizes = self._resizes(fence)
        self._fence = fence
        self._history = History(fence.plans)
        self.memory.endpoints = fence.endpoints
        if fence.generation > self.generation:
            self._accept(fence, resizes=resizes)
        elif not self.active:  # Told again of the same membership: now for which places to keep workers.
            self._staff(fence)
        if fence.valid_to is not None:
            self.memory.undo_after(fence.valid_to)
        self._answer.give()

    def _resizes(self, fence: m.Fence) -> bool:
        """Whether what is here is of a job with another number of slots, or of the slots before it had another one."""
        return bool(self.places) and (len(fence.places) != len(self.places) or self.generation < fence.size_since)

    def _start_over(self) -> None:
        """No process and no memory of this node is of a slot that there is."""
        for worker in list(self.workers.values()):
            self._discard(worker)
        self.memory.forget_all()
        self._peers.clear()

    def _accept(self, fence: m.Fence, *, resizes: bool) -> None:
        """Leave the old generation: from here on nothing of it can become valid on this node."""
        self.generation, self.places = fence.generation, fence.places
        self.training, self.plan = False, None
        self._restored.clear()
        self._lost.clear()
        if self._protected:
            self._finished.clear()
        self.memory.fence(fence.generation)
        if resizes:
            self._start_over()
        self.rendezvous.advance(fence.generation)
        for worker in self.workers.values():
            worker.leave(fence, member=self.active)
            worker.link.send(fence)
        self._staff(fence)
        self._answer.begin(fence.generation)
        self._spawn_task(self._answer.look_around(fence))

    def _staff(self, fence: m.Fence) -> None:
        """Have exactly the workers that *fence* asks for. Without protection, one that has finished is not run again."""
        wanted = [slot for slot in self._wanted_slots(fence) if slot not in self._finished]
        for slot, worker in list(self.workers.items()):
            if slot not in wanted:
                self._discard(worker)
        for slot in wanted:
            if slot not in self.workers:
                self._start_worker(slot)

    def _wanted_slots(self, fence: m.Fence) -> list[Slot]:
        width = self.config.nproc_per_node
        if self.node in fence.places:
            positions: tuple[int, ...] = (fence.places.index(self.node),)
        else:
            positions = fence.positions[: self.config.spare_positions]
        return [slot for position in positions for slot in range(position * width, (position + 1) * width)]

    @property
    def active(self) -> bool:
        """This node is a member of the newest generation."""
        return self.node in self.places

    def _discard(self, worker: WorkerProcess) -> None:
        worker.unwanted = True
        self.memory.vault.forget_empty(worker.slot)
        self.pool.kill(worker)
        del self.workers[worker.slot]

    def _start_worker(self, slot: Slot) -> None:
        first = self.memory.endpoints.get(self.places[0]) if self.places else None
        master = first.host if first is not None else self.config.advertise_host
        worker = self.pool.spawn(slot, self.generation, rehearse=not self.active, master=master, nodes=len(self.places))
        worker.fenced = self.generation
        self.workers[slot] = worker
        if self._fence is not None:
            worker.link.send(self._fence)

    # --- plan and go -----------------------------------------------------------------------------------------------

    def _on_plan(self, plan: m.Plan) -> None:
        if plan.generation != self.generation or self.plan is not None:
            return
        self.plan = plan
        self._history.planned(plan.generation, plan.resume_step)
        self.memory.adopt_plan(plan)
        if self.active:
            for worker in self.workers.values():
                worker.link.send(w.Connect(generation=plan.generation, keep=plan.keep))
                self._spawn_task(self._load(worker, plan))

    async def _load(self, worker: WorkerProcess, plan: m.Plan) -> None:
        try:
            await bring(worker, self.memory, plan, self.workers, lambda: plan.generation == self.generation)
        except HotswapError as error:
            self._restore_failed(worker.slot, plan.generation, str(error))

    def _restore_failed(self, slot: Slot, generation: Generation, detail: str) -> None:
        if generation == self.generation:
            self.control.send(m.RestoreFailed(slot=slot, generation=generation, detail=detail))

    def _on_go(self, go: m.Go) -> None:
        if go.generation != self.generation:
            return
        assert self._fence is not None, "a generation trains after its fence"
        # By place, not by living workers: one that crashes just now leaves its snapshots to its successor.
        self.memory.forget_moved(self._wanted_slots(self._fence) if self.active else ())
        self.training = self.active
        for worker in self.workers.values() if self.active else ():
            worker.link.send(go)
        if not self.active:
            self._last_words.give()  # Its place was taken because of what they tell, and it commits no steps any more.

    def _on_end_hung(self, message: m.EndHung) -> None:
        worker = self.workers.get(message.slot)
        if message.generation == self.generation and worker is not None:
            self._spawn_task(self._hung.end(worker, message))

    # --- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_message(self, worker: WorkerProcess, message: Any) -> None:
        if worker.unwanted:
            return
        slot = worker.slot
        if isinstance(message, w.Joined):
            self._on_joined()
        elif isinstance(message, w.Built):
            worker.built, self._peers[slot] = message, message.peers
            self.control.send(worker.as_built(message))
        elif isinstance(message, w.Reserve):
            self._spawn_task(reserve(worker, message, self.memory, self.pool, self.workers))
        elif isinstance(message, w.SnapshotBegin):
            self.memory.snapshot_begin(slot, message.buffer)
        elif isinstance(message, w.SnapshotDone):
            self.memory.snapshot_done(slot, message)
            if message.durable:
                self.memory.checkpoints.write(slot, message.step, message.generation, self.pool.call)
        elif isinstance(message, w.Parked):
            self._on_parked(worker, message)
        elif isinstance(message, w.Comparing | w.Compared):
            if message.generation == self.generation or self.plan is None:  # Said before a fence, heard after it.
                heed(worker, message, self.memory, self.pool, self.control.send)
        elif isinstance(message, w.Restored):
            self._on_restored(worker, message)
        elif isinstance(message, w.Progressed):
            worker.note(message, asyncio.get_running_loop().time())
        elif isinstance(message, w.Failed):
            worker.detail = message.detail
            if message.restore:
                self._restore_failed(slot, message.generation, message.detail)
        elif isinstance(message, m.KvSet):
            self.rendezvous.set(message)
        elif isinstance(message, m.KvGet):
            self.rendezvous.get(slot, message)
        elif (news := forwarded(slot, message)) is not None:
            self._forward(message.generation, news)

    def _on_joined(self) -> None:
        """The script uses hotswap: news that the coordinator and the spares are waiting for."""
        if not self._protected:
            self._protected = True
            self._heartbeat()

    def _forward(self, generation: Generation, message: Any) -> None:
        if generation == self.generation:
            self.control.send(message)

    def _on_parked(self, worker: WorkerProcess, message: w.Parked) -> None:
        if message.generation == self.generation:
            worker.park(message)
            self._answer.give_once()

    def _on_restored(self, worker: WorkerProcess, message: w.Restored) -> None:
        slot = worker.slot
        if message.generation == self.generation and self.plan is not None:
            worker.holds_state = True
            self._restored[slot] = message.step
            self.memory.ensure_replicated(slot, message.step, self.plan)
            self._ready_if(slot)

    def _ready_if(self, slot: Slot) -> None:
        """Ready = restored, and the restored state is again in two places."""
        if slot in self._restored and self.memory.acked.get(slot) == self._restored[slot] and not self.training:
            del self._restored[slot]
            self.control.send(m.WorkerReady(slot=slot, generation=self.generation))

    def _replicated(self, slot: Slot, generation: Generation, step: Step, free: int) -> None:
        """The snapshot of *step* is complete here and at the holder."""
        worker = self.workers.get(slot)
        if generation != self.generation or worker is None:
            return
        worker.moved_at = asyncio.get_running_loop().time()
        worker.link.send(w.Acked(generation=generation, step=step, free=free))
        self._ready_if(slot)
        if self.training and self.memory.all_acked(step, self.workers):
            self._heartbeat()
            self._last_words.give()

    def _replication_stalled(self, slot: Slot, generation: Generation, detail: str) -> None:
        self._forward(generation, m.WorkerTrouble(slot=slot, generation=generation, detail=detail))

    def _durable(self, slot: Slot, step: Step, generation: Generation) -> None:
        self.control.send(m.CheckpointShard(slot=slot, step=step, generation=generation))

    def _checkpoint_committed(self, step: Step) -> None:
        self.control.send(m.CheckpointCommitted(step=step))

    def _on_worker_end(self, worker: WorkerProcess) -> None:
        """The process has ended and everything it said has been heard."""
        if worker.unwanted or self._leaving or self.workers.get(worker.slot) is not worker:
            return
        slot = worker.slot
        del self.workers[slot]
        log.info("worker of slot %d ended: %s", slot, worker.describe_end())
        if not self.active:
            self._respawn_spare(worker)
        elif worker.status == 0:
            self._finished.add(slot)
            self.control.send(m.WorkerFinished(slot=slot, generation=worker.fenced))
        else:
            self._lost.add(slot)
            assert worker.status is not None
            self.control.send(
                m.WorkerLost(slot=slot, generation=worker.fenced, status=worker.status, detail=worker.describe_end())
            )
            self._answer.give_once()
            self._last_words.add(worker.slot, worker.outputs)

    def _respawn_spare(self, worker: WorkerProcess) -> None:
        """A spare that keeps failing stays a warm spare: its workers are started when it is promoted."""
        self.control.send(
            m.WorkerLost(
                slot=worker.slot,
                generation=worker.fenced,
                status=worker.status if worker.status is not None else 1,
                detail=worker.describe_end(),
            )
        )
        self._spare_respawns += 1
        if self._spare_respawns <= RESPAWNS_OF_A_SPARE_MAX:
            self._start_worker(worker.slot)
        else:
            log.error(
                "workers of this spare failed %d times; it stays warm, without built workers", self._spare_respawns
            )

    def _give(self, slot: Slot, value: m.KvValue) -> None:
        if slot in self.workers:
            self.workers[slot].link.send(value)


def main() -> NoReturn:
    """Entry point of ``python -m hotswap.node.agent``."""
    die_with_parent(signal.SIGTERM)
    set_up_logging()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentConfig)
    run_and_leave(Agent(config, node_id(config.node, config.incarnation)).run())


if __name__ == "__main__":
    main()
