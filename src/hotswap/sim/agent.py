"""One node: its agent, which supervises workers and owns their snapshots and other nodes' replicas.

It follows ``hotswap.node.agent`` and ``hotswap.node.memory_keeper`` in what it answers, and in which order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.core import messages as m
from hotswap.core.types import Endpoint, NodeId, Slot, Source, SourceKind, Step
from hotswap.sim.memory import Memory
from hotswap.sim.network import Connection
from hotswap.sim.worker import Load, Said, WorkerModel
from hotswap.sim.world import Timer

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel

HEARTBEAT_S = 1.0
PARK_S = 10.0
STALLED_S = 5.0
SPARE_POSITIONS = 1


class AgentModel:
    """Alive until its node is lost or the job stops."""

    def __init__(self, job: JobModel, node: NodeId) -> None:
        """Connects and registers at once."""
        self.job = job
        self.world = job.world
        self.setup = job.setup
        self.node = node
        self.alive = True
        self.memory = Memory(versions=self.setup.versions)
        self.generation = 0
        self.places: tuple[NodeId, ...] = ()
        self.training = False
        self.plan: m.Plan | None = None
        self.fence: m.Fence | None = None
        self.acked: dict[Slot, Step] = {}
        self.workers: dict[Slot, WorkerModel] = {}
        self.connection: Connection | None = None
        self._lost: set[Slot] = set()
        self._finished: set[Slot] = set()
        self._restored: dict[Slot, Step] = {}
        self._fence_answered = False
        self._park_timer: Timer | None = None
        self._processes = 0
        self.world.after(0.0, self.connect)
        self.world.after(HEARTBEAT_S, self._beat)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open a connection and register on it; try again while there is no coordinator."""
        if not self.alive or self.connection is not None:
            return
        self.connection = self.job.server.open(self)
        if self.connection is None:
            self.world.after(self.world.between(0.02, 1.0), self.connect)
            return
        self.connection.up.send(self._register())

    def disconnected(self, connection: Connection) -> None:
        """The connection has ended."""
        if self.connection is connection:
            self.connection = None
            self.world.after(self.world.between(0.02, 0.5), self.connect)

    def _register(self) -> m.Register:
        return m.Register(
            node=self.node,
            fault_domain=self.job.domain_of(self.node),
            endpoint=Endpoint(host=self.node, port=1),
            generation=self.generation,
            places=self.places,
            planned=self.plan is not None,
            training=self.training,
            built=tuple(self._built(worker) for worker in self.workers.values() if worker.built and worker.alive),
            acked=dict(self.acked),
            lost=tuple(sorted(self._lost)),
            finished=tuple(sorted(self._finished)),
            checkpoint_step=self.job.checkpoint_step(),
        )

    def send(self, message: m.FromAgent) -> None:
        """Tell the coordinator, if there is one; the next registration says all that still matters."""
        if self.alive and self.connection is not None:
            self.connection.up.send(message)

    def _beat(self) -> None:
        if self.alive:
            self.send(m.Heartbeat(generation=self.generation, acked=dict(self.acked)))
            self.world.after(HEARTBEAT_S, self._beat)

    def hear(self, message: m.ToAgent) -> None:
        """A message from the coordinator."""
        if not self.alive:
            return
        if isinstance(message, m.Fence):
            self._on_fence(message)
        elif isinstance(message, m.Plan):
            self._on_plan(message)
        elif isinstance(message, m.Go):
            self._on_go(message)
        elif isinstance(message, m.CommitCheckpoint):
            self.job.commit_checkpoint(message.step)
        elif isinstance(message, m.Stop):
            self.die("was told to stop")

    def die(self, why: str) -> None:
        """The node is lost: agent, workers and memory, all at once."""
        if not self.alive:
            return
        self.alive = False
        self.world.note(f"{self.node} is gone: {why}")
        for worker in list(self.workers.values()):
            worker.exit(-9)
        self.workers.clear()
        if self.connection is not None:
            self.connection.cut(by_agent=True)
            self.connection = None

    # --- fence -----------------------------------------------------------------------------------------------------

    def _on_fence(self, fence: m.Fence) -> None:
        if fence.generation < self.generation:
            return
        if fence.generation > self.generation:
            self._accept(fence)
        self._answer_fence()

    def _accept(self, fence: m.Fence) -> None:
        self.fence, self.generation, self.places = fence, fence.generation, fence.places
        self.training, self.plan, self._fence_answered = False, None, False
        self._restored.clear()
        self._lost.clear()
        self._finished.clear()
        self.acked.clear()
        self.memory.fence = fence.generation
        if fence.valid_to is not None and self.setup.drop_undone:
            self.memory.truncate(fence.valid_to)
        wanted = self._wanted(fence)
        for slot, worker in list(self.workers.items()):
            if slot not in wanted:
                worker.unwanted = True
                worker.exit(-9)
                del self.workers[slot]
        for worker in self.workers.values():
            worker.parked = None
            worker.down.send(fence)
        for slot in wanted:
            if slot not in self.workers:
                self._start(slot)
        if self._park_timer is not None:
            self._park_timer.cancel()
        self._park_timer = self.world.after(PARK_S, self._kill_unparked, self.generation)

    def _wanted(self, fence: m.Fence) -> list[Slot]:
        width = self.setup.width
        positions = (fence.places.index(self.node),) if self.active else fence.positions[:SPARE_POSITIONS]
        return [slot for position in positions for slot in range(position * width, (position + 1) * width)]

    @property
    def active(self) -> bool:
        """A member of the newest generation it knows."""
        return self.node in self.places

    def _start(self, slot: Slot) -> None:
        self._processes += 1
        worker = WorkerModel(self, slot, self._processes)
        self.workers[slot] = worker
        assert self.fence is not None, "workers are started by a fence"
        worker.down.send(self.fence)

    def _kill_unparked(self, generation: int) -> None:
        if self.alive and generation == self.generation and not self._fence_answered:
            for worker in self._unparked():
                worker.exit(-9)

    def _unparked(self) -> list[WorkerModel]:
        """Only who may have entered a generation can be in one."""
        return [w for w in self.workers.values() if w.alive and w.built and w.loaded and w.parked is None]

    def _answer_fence(self) -> None:
        if self._unparked():
            return
        self._fence_answered = True
        parked = [w for w in self.workers.values() if w.alive and w.restored and w.parked is not None]
        self.send(
            m.NodeFenced(
                generation=self.generation,
                held=self.memory.inventory(),
                workers=tuple(w.parked.state for w in parked if w.parked is not None and w.parked.state is not None),
                checkpoint_step=self.job.checkpoint_step(),
            )
        )

    # --- plan and go -----------------------------------------------------------------------------------------------

    def _on_plan(self, plan: m.Plan) -> None:
        if plan.generation != self.generation or self.plan is not None:
            return
        self.plan = plan
        self.memory.truncate(plan.resume_step)
        for slot in self._mine():
            if slot in self.workers:
                self._load(self.workers[slot], plan, plan.sources[slot])

    def _mine(self) -> list[Slot]:
        """By place, not by worker: one may just have crashed, and then its snapshots matter most."""
        return self._wanted(self.fence) if self.active and self.fence is not None else []

    def _load(self, worker: WorkerModel, plan: m.Plan, source: Source) -> None:
        """Bring the slot's state into this node's memory, then tell the worker where it is."""
        here = self.memory.find(worker.slot, plan.resume_step)
        if source.kind in (SourceKind.FRESH, SourceKind.CHECKPOINT):
            self._tell_load(worker, plan, source.kind, -1)
        elif here >= 0 or source.kind is not SourceKind.REPLICA:
            self._tell_load(worker, plan, source.kind, here)
        else:
            self.world.after(self.world.between(*self.setup.transfer_s), self._fetch, worker, plan, source)

    def _fetch(self, worker: WorkerModel, plan: m.Plan, source: Source) -> None:
        if not self.alive or plan.generation != self.generation or not worker.alive:
            return
        holder = self.job.agents[source.unique_from]
        state = holder.memory.replica(worker.slot, plan.resume_step) if holder.alive else None
        if state is None or self.world.chance(self.setup.flaky):
            detail = f"{source.unique_from} did not give slot {worker.slot} at step {plan.resume_step}"
            self.send(m.RestoreFailed(slot=worker.slot, generation=plan.generation, detail=detail))
            return
        buffers = self.memory.granted(worker.slot)
        index = self.memory.free(worker.slot)
        buffers[index].content = state
        self.memory.complete(buffers, buffers[index], plan.resume_step, plan.generation)
        self._tell_load(worker, plan, source.kind, index)

    def _tell_load(self, worker: WorkerModel, plan: m.Plan, source: SourceKind, buffer: int) -> None:
        worker.loaded = plan.generation
        worker.down.send(Load(plan=plan, source=source, buffer=buffer, free=self.memory.free(worker.slot)))

    def _on_go(self, go: m.Go) -> None:
        if go.generation == self.generation and self.plan is not None:
            # Not before: until everybody is restored what has moved may still be a source.
            mine = self._mine()
            self.memory.own = {slot: kept for slot, kept in self.memory.own.items() if slot in mine}
            holders = self.plan.holders
            self.memory.replicas = {s: kept for s, kept in self.memory.replicas.items() if holders.get(s) == self.node}
            self.training = self.active
            for worker in self.workers.values() if self.active else ():
                worker.down.send(go)

    # --- workers ---------------------------------------------------------------------------------------------------

    def hear_worker(self, worker: WorkerModel, said: Said) -> None:
        """A message from a worker, which may be dead by now."""
        if not self.alive or worker.unwanted:
            return
        slot, generation = worker.slot, said.generation
        if said.what == "built":
            worker.built = True
            self.send(self._built(worker))
        elif said.what == "begin":
            self.memory.granted(slot)[said.buffer].clear()
        elif said.what == "snapshot":
            self._on_snapshot(slot, said)
        elif said.what == "parked" and generation == self.generation:
            worker.parked = said
            self._answer_fence()
        elif said.what == "restored" and generation == self.generation and self.plan is not None:
            worker.restored = True
            self._restored[slot] = said.step
            self._ensure_replicated(slot, said.step, self.plan)
            self._ready_if(slot)
        elif generation == self.generation and said.what == "connected":
            self.send(m.WorkerConnected(slot=slot, generation=generation))
        elif generation == self.generation and said.what == "trouble":
            self.send(m.WorkerTrouble(slot=slot, generation=generation, detail="connection reset by peer"))

    def _built(self, worker: WorkerModel) -> m.WorkerBuilt:
        return m.WorkerBuilt(slot=worker.slot, generation=self.generation, shape="model")

    def worker_ended(self, worker: WorkerModel, status: int) -> None:
        """A process is gone and everything it said was heard."""
        slot = worker.slot
        if not self.alive or worker.unwanted or self.workers.get(slot) is not worker:
            return
        del self.workers[slot]
        if not self.active:
            self.send(m.WorkerLost(slot=slot, generation=self.generation, status=status, detail="on a spare"))
            self._start(slot)
        elif status == 0:
            self._finished.add(slot)
            self.send(m.WorkerFinished(slot=slot, generation=self.generation))
        else:
            self._lost.add(slot)
            self.send(m.WorkerLost(slot=slot, generation=self.generation, status=status, detail="killed by SIGKILL"))
        if self.active and not self._fence_answered:
            self._answer_fence()

    # --- snapshots and replicas ------------------------------------------------------------------------------------

    def _on_snapshot(self, slot: Slot, said: Said) -> None:
        buffers = self.memory.granted(slot)
        if said.generation < self.memory.fence:
            buffers[said.buffer].clear()
            return
        self.memory.complete(buffers, buffers[said.buffer], said.step, said.generation)
        self._replicate(slot, said.step, self.generation, self.world.now)

    def _ensure_replicated(self, slot: Slot, step: Step, plan: m.Plan) -> None:
        if self.acked.get(slot) == step:
            return
        if slot not in plan.push:
            self._ack(slot, step)
        elif self.memory.find(slot, step) >= 0:
            self._replicate(slot, step, self.generation, self.world.now)

    def _replicate(self, slot: Slot, step: Step, generation: int, began: float) -> None:
        """Push until it is acknowledged or the generation ends; a long failure is reported, for it stops the gate."""
        index = self.memory.find(slot, step)
        if not self.alive or generation != self.generation or self.plan is None or index < 0:
            return
        holder = self.plan.holders.get(slot)
        if holder is None:
            self.job.chronicle.stored_alone(slot, self.memory.granted(slot)[index].content)
            self._ack(slot, step)
            return
        self.job.moment("push")
        content = self.memory.granted(slot)[index].content
        delay_s = self.world.between(*self.setup.transfer_s)
        self.world.after(delay_s, self._arrive, slot, step, generation, holder, content, began)

    def _arrive(self, slot: Slot, step: Step, generation: int, holder: NodeId, content: object, began: float) -> None:
        """The last byte is there, if both ends still are and the snapshot was not overwritten meanwhile."""
        index = self.memory.find(slot, step)
        if not self.alive or index < 0:
            return
        receiver, state = self.job.agents[holder], self.memory.granted(slot)[index].content
        if not receiver.alive or state is not content or self.world.chance(self.setup.flaky):
            if generation == self.generation and self.world.now > began + STALLED_S:
                self.send(m.WorkerTrouble(slot=slot, generation=generation, detail=f"no replica at {holder}"))
                began = self.world.now
            self.world.after(0.05, self._replicate, slot, step, generation, began)
            return
        if step < self.acked.get(slot, -1):
            return
        if receiver.memory.receive(slot, state, step, generation):
            self.job.chronicle.stored(slot, self.node, holder, state)
            self.world.after(self.world.between(0.0005, 0.02), self._acknowledged, slot, step, generation)

    def _acknowledged(self, slot: Slot, step: Step, generation: int) -> None:
        if self.alive and generation == self.generation:
            self._ack(slot, step)

    def _ack(self, slot: Slot, step: Step) -> None:
        self.acked[slot] = max(step, self.acked.get(slot, -1))
        worker = self.workers.get(slot)
        if worker is not None:
            worker.down.send((self.generation, step, self.memory.free(slot)))
            self._ready_if(slot)
            if self.training and all(self.acked.get(other, -1) >= step for other in self.workers):
                self.send(m.Heartbeat(generation=self.generation, acked=dict(self.acked)))

    def _ready_if(self, slot: Slot) -> None:
        if slot in self._restored and self.acked.get(slot) == self._restored[slot] and not self.training:
            del self._restored[slot]
            self.send(m.WorkerReady(slot=slot, generation=self.generation))
