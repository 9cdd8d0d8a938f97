"""The agent process: supervises the node's workers, owns snapshot and replica memory, speaks with the coordinator.

Reads its AgentConfig as JSON on standard input. One asyncio loop decides; memory transfers run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.rendezvous import RendezvousTable
from hotswap.core.types import Generation, NodeId, Slot, Step, node_id
from hotswap.errors import EXIT_OK, EXIT_REQUEUE, HotswapError
from hotswap.node.control import ControlChannel
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.process import die_with_parent, set_up_logging
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool
from hotswap.wire import worker_messages as w

log = logging.getLogger("hotswap.agent")
RESPAWNS_OF_A_SPARE_MAX = 3
PARK_S = 10.0


class Agent:
    """One node. All methods run on the event loop's thread."""

    def __init__(self, config: AgentConfig, node: NodeId) -> None:
        """Nothing is opened before ``run``."""
        self.config = config
        self.node = node
        self.generation: Generation = 0
        self.places: tuple[NodeId, ...] = ()
        self.training = False
        self.plan: m.Plan | None = None
        self.workers: dict[Slot, WorkerProcess] = {}
        self.memory = MemoryKeeper(config, node, self._replicated, self._replication_stalled, self._durable)
        self.pool = WorkerPool(config, node, self._on_worker_message, self._on_worker_end)
        self.control = ControlChannel(config, self._register, self._on_coordinator_message)
        self.rendezvous: RendezvousTable[Slot] = RendezvousTable()
        self._lost: set[Slot] = set()
        self._finished: set[Slot] = set()
        self._fence_answered = False
        self._spare_respawns = 0
        self._park_timer: asyncio.TimerHandle | None = None
        self._fence: m.Fence | None = None
        self._restored: dict[Slot, Step] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until the coordinator says stop or a signal does."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, 128 + number)
        self.memory.start()
        try:
            await self.pool.start()
            self._spawn_task(self.control.run())
            self._spawn_task(self._beat())
            code = await self._exit
        finally:
            await self.pool.close(list(self.workers.values()))
            self.memory.close()
        await self.control.close()
        return code

    def _leave(self, exit_code: int) -> None:
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(exit_code)

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("agent task failed", exc_info=task.exception())
            self._leave(EXIT_REQUEUE)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def _register(self) -> m.Register:
        return m.Register(
            node=self.node,
            fault_domain=self.config.fault_domain,
            endpoint=self.memory.endpoint,
            generation=self.generation,
            places=self.places,
            training=self.training,
            built=tuple(
                self._built(worker) for worker in self.workers.values() if worker.built is not None and worker.alive
            ),
            acked=dict(self.memory.acked),
            lost=tuple(sorted(self._lost)),
            finished=tuple(sorted(self._finished)),
            checkpoint_step=self.memory.checkpoint_step(),
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.config.timing.heartbeat_s)
            self._heartbeat()
            self._require_coordinator()

    def _require_coordinator(self) -> None:
        """Training needs no coordinator, but workers that wait for one must not wait for ever."""
        alone_s = self.control.alone_s
        if alone_s > self.config.timing.coordinator_s and not self.training:
            log.error(
                "no coordinator for %.0f s while workers wait for one; giving up, the job can be requeued", alone_s
            )
            self._leave(EXIT_REQUEUE)

    def _heartbeat(self) -> None:
        self.control.send(m.Heartbeat(generation=self.generation, acked=dict(self.memory.acked)))

    def _on_coordinator_message(self, message: Any) -> None:
        if isinstance(message, m.Fence):
            self._on_fence(message)
        elif isinstance(message, m.Plan):
            self._on_plan(message)
        elif isinstance(message, m.Go):
            self._on_go(message)
        elif isinstance(message, m.KvValue):
            self._on_value(message)
        elif isinstance(message, m.CommitCheckpoint):
            self.memory.commit_checkpoint(message.step, message.slots)
        elif isinstance(message, m.Stop):
            log.info("stop: %s", message.reason)
            self._spawn_task(self._stop(message))

    async def _stop(self, message: m.Stop) -> None:
        for worker in self.workers.values():
            worker.link.send(w.Finish(exit_code=message.exit_code, reason=message.reason))
        self._leave(EXIT_OK if message.exit_code == EXIT_OK else message.exit_code)

    # --- fence -----------------------------------------------------------------------------------------------------

    def _on_fence(self, fence: m.Fence) -> None:
        if fence.generation < self.generation:
            return
        if fence.generation > self.generation:
            self._accept(fence)
        self.memory.endpoints = fence.endpoints
        self._answer_fence()

    def _accept(self, fence: m.Fence) -> None:
        """Leave the old generation: from here on nothing of it can become valid on this node."""
        self._fence = fence
        self.memory.endpoints = fence.endpoints
        self.generation, self.places = fence.generation, fence.places
        self.training, self.plan, self._fence_answered = False, None, False
        self._restored.clear()
        self._lost.clear()
        self._finished.clear()
        self.memory.fence(fence.generation)
        self.rendezvous.advance(fence.generation)
        wanted = self._wanted_slots(fence)
        for slot, worker in list(self.workers.items()):
            if slot not in wanted:
                self._discard(worker)
        for worker in self.workers.values():
            worker.fenced, worker.parked = fence.generation, None
            worker.link.send(fence)
        for slot in wanted:
            if slot not in self.workers:
                self._start_worker(slot)
        self._arm_park_timer()

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
        worker.kill()
        del self.workers[worker.slot]

    def _start_worker(self, slot: Slot) -> None:
        master = self.memory.endpoints[self.places[0]].host if self.places else self.config.advertise_host
        worker = self.pool.spawn(slot, self.generation, rehearse=not self.active, master=master)
        worker.fenced = self.generation
        self.workers[slot] = worker
        if self._fence is not None:
            worker.link.send(self._fence)

    def _arm_park_timer(self) -> None:
        if self._park_timer is not None:
            self._park_timer.cancel()
        self._park_timer = asyncio.get_running_loop().call_later(PARK_S, self._kill_unparked, self.generation)

    def _kill_unparked(self, generation: Generation) -> None:
        """A worker that cannot be stopped in place is stopped for good; its state is in this node's memory."""
        if generation == self.generation and not self._fence_answered:
            for worker in self._unparked():
                worker.detail = f"did not leave the old generation within {PARK_S:g} s"
                worker.kill()

    def _unparked(self) -> list[WorkerProcess]:
        """Also the dead whose last words are not read yet: one of them may say which buffer it was overwriting."""
        return [worker for worker in self.workers.values() if worker.loaded and worker.parked is None]

    def _answer_fence(self) -> None:
        if self._unparked():
            return
        self._fence_answered = True
        states = [state for worker in self.workers.values() if worker.alive and (state := worker.state()) is not None]
        groups = {
            worker.slot: worker.parked.groups
            for worker in self.workers.values()
            if worker.parked is not None and worker.alive
        }
        self.control.send(
            m.NodeFenced(
                generation=self.generation,
                held=self.memory.inventory(),
                workers=tuple(states),
                groups=groups,
                checkpoint_step=self.memory.checkpoint_step(),
            )
        )

    # --- plan and go -----------------------------------------------------------------------------------------------

    def _on_plan(self, plan: m.Plan) -> None:
        if plan.generation != self.generation or self.plan is not None:
            return
        self.plan = plan
        self.memory.adopt_plan(plan, self.workers if self.active else ())
        if self.active:
            for worker in self.workers.values():
                self._spawn_task(self._load(worker, plan))

    async def _load(self, worker: WorkerProcess, plan: m.Plan) -> None:
        """Bring the slot's bytes into this node's memory, then tell the worker where they are."""
        source = plan.sources[worker.slot]
        try:
            located = await self.memory.locate(worker.slot, source, plan.resume_step)
        except HotswapError as error:
            self._restore_failed(worker.slot, plan.generation, str(error))
            return
        if plan.generation != self.generation or not worker.alive:
            return
        if located is not None and not worker.granted:
            self._grant(worker)
        worker.loaded = plan.generation
        load = w.Load(
            generation=plan.generation, resume_step=plan.resume_step, source=source.kind, keep=plan.keep, free=0
        )
        if located is not None:
            load = replace(
                load,
                free=self.memory.free(worker.slot),
                buffer=located.buffer,
                shared_nbytes=located.shared_nbytes,
                unique_nbytes=located.unique_nbytes,
            )
        elif worker.granted:
            load = replace(load, free=self.memory.free(worker.slot))
        worker.link.send(load)

    def _restore_failed(self, slot: Slot, generation: Generation, detail: str) -> None:
        if generation == self.generation:
            self.control.send(m.RestoreFailed(slot=slot, generation=generation, detail=detail))

    def _grant(self, worker: WorkerProcess) -> None:
        worker.granted = True
        files = self.memory.buffers(worker.slot)
        granted = w.Granted(nbytes=files[0].nbytes, buffers=len(files), free=self.memory.free(worker.slot))
        worker.link.send(granted, fds=[file.fd for file in files])

    def _on_go(self, go: m.Go) -> None:
        if go.generation != self.generation:
            return
        self.training = True
        self.memory.forget_moved_replicas()
        for worker in self.workers.values():
            worker.link.send(go)

    # --- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_message(self, worker: WorkerProcess, message: Any) -> None:
        if worker.unwanted:
            return
        slot = worker.slot
        if isinstance(message, w.Built):
            worker.built = message
            self.control.send(self._built(worker))
        elif isinstance(message, w.Reserve):
            self.memory.reserve(slot, message.nbytes, message.buffers)
            self._grant(worker)
        elif isinstance(message, w.SnapshotBegin):
            self.memory.snapshot_begin(slot, message.buffer)
        elif isinstance(message, w.SnapshotDone):
            self.memory.snapshot_done(slot, message)
            if message.durable:
                self.memory.make_durable(slot, message.step, self.pool.call)
        elif isinstance(message, w.Parked):
            self._on_parked(worker, message)
        elif isinstance(message, w.Connected):
            self._forward(message.generation, m.WorkerConnected(slot=slot, generation=message.generation))
        elif isinstance(message, w.Restored):
            self._on_restored(slot, message)
        elif isinstance(message, w.Trouble):
            self._forward(
                message.generation, m.WorkerTrouble(slot=slot, generation=message.generation, detail=message.detail)
            )
        elif isinstance(message, w.Failed):
            worker.detail = message.detail
            if message.restore:
                self._restore_failed(slot, message.generation, message.detail)
        else:
            self._on_rendezvous(slot, message)

    def _built(self, worker: WorkerProcess) -> m.WorkerBuilt:
        assert worker.built is not None
        built = worker.built
        return m.WorkerBuilt(
            slot=worker.slot, generation=worker.fenced, shape=built.shape, peers=built.peers, rehearsed=built.rehearsed
        )

    def _forward(self, generation: Generation, message: Any) -> None:
        if generation == self.generation:
            self.control.send(message)

    def _on_parked(self, worker: WorkerProcess, message: w.Parked) -> None:
        if message.generation == self.generation:
            worker.parked = message
            self._answer_fence()

    def _on_restored(self, slot: Slot, message: w.Restored) -> None:
        if message.generation == self.generation and self.plan is not None:
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
        worker.link.send(w.Acked(generation=generation, step=step, free=free))
        self._ready_if(slot)
        if self.training and self.memory.all_acked(step, [s for s in self.workers]):
            self._heartbeat()

    def _replication_stalled(self, slot: Slot, generation: Generation, detail: str) -> None:
        self._forward(generation, m.WorkerTrouble(slot=slot, generation=generation, detail=detail))

    def _durable(self, slot: Slot, step: Step) -> None:
        self.control.send(m.CheckpointShard(slot=slot, step=step))

    def _on_worker_end(self, worker: WorkerProcess) -> None:
        """The process has ended and everything it said has been heard."""
        if worker.unwanted or self.workers.get(worker.slot) is not worker:
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
            if not self._fence_answered:
                self._answer_fence()

    def _respawn_spare(self, worker: WorkerProcess) -> None:
        """A spare that keeps failing stays a warm spare: its workers are started when it is promoted."""
        self._spare_respawns += 1
        if self._spare_respawns <= RESPAWNS_OF_A_SPARE_MAX:
            self._start_worker(worker.slot)
        else:
            log.error(
                "workers of this spare failed %d times; it stays warm, without built workers", self._spare_respawns
            )

    # --- rendezvous ------------------------------------------------------------------------------------------------

    def _on_rendezvous(self, slot: Slot, message: Any) -> None:
        if isinstance(message, m.KvSet):
            self._publish(message.generation, message.key, message.value)
            self.control.send(message)
        elif isinstance(message, m.KvGet) and message.generation == self.generation:
            first = message.key not in self.rendezvous.waiting
            value = self.rendezvous.get(message.generation, message.key, slot)
            if value is not None:
                self._give(slot, message.generation, message.key, value)
            elif first:
                self.control.send(message)

    def _on_value(self, message: m.KvValue) -> None:
        self._publish(message.generation, message.key, message.value)

    def _publish(self, generation: Generation, key: str, value: bytes) -> None:
        for slot in self.rendezvous.set(generation, key, value):
            self._give(slot, generation, key, value)

    def _give(self, slot: Slot, generation: Generation, key: str, value: bytes) -> None:
        if slot in self.workers:
            self.workers[slot].link.send(m.KvValue(generation=generation, key=key, value=value))


def next_incarnation(log_dir: Path) -> int:
    """Count this node's agents in a file beside its logs; a node id is never reused."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "incarnation"
    with contextlib.suppress(FileNotFoundError, ValueError):
        number = int(path.read_text()) + 1
        path.write_text(str(number))
        return number
    path.write_text("1")
    return 1


def main() -> int:
    """Entry point of ``python -m hotswap.node.agent``."""
    die_with_parent(signal.SIGTERM)
    set_up_logging()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentConfig)
    incarnation = next_incarnation(Path(config.log_dir) / config.node)
    return asyncio.run(Agent(config, node_id(config.node, incarnation)).run())


if __name__ == "__main__":
    sys.exit(main())
