"""One node: the real agent on a loop in virtual time, and the processes that it starts."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.types import Endpoint, Generation, NodeId, Slot
from hotswap.errors import HotswapError
from hotswap.node.agent import Agent
from hotswap.node.control import ControlChannel
from hotswap.node.parts import Parts
from hotswap.node.witness import LastWords
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool
from hotswap.sim.chronicle import Violation
from hotswap.sim.memory import KeeperModel, MemoryModel, read_generation, read_state
from hotswap.sim.network import LOCAL_DELAY_S, Link, Pipe
from hotswap.sim.worker import WorkerModel
from hotswap.wire.channels import worker_codec

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel

SHARD = re.compile(r"step-(\d+)/slot-(\d+)$")
NOTICED_S = 10.0
"""After so long a silence the peers of a host that is gone give up its connections."""
CODEC = worker_codec()


class NodeModel:
    """Alive until it is lost or its agent leaves. ``silent``: it went without a word, as a host does that loses power."""

    def __init__(self, job: JobModel, node: NodeId) -> None:
        """The agent starts at once."""
        self.job = job
        self.id = node
        self.alive = True
        self.silent = False
        self.loop = job.new_loop(node)
        self.link: Link | None = None
        setup = job.setup
        name, _, incarnation = node.partition("#")
        config = AgentConfig(
            job_id="job",
            token="simulated job, no secret",
            node=name,
            incarnation=int(incarnation),
            fault_domain=job.domain_of(node),
            coordinator_host=job.heads[0],
            coordinator_port=1,
            coordinators=tuple((host, 1) for host in job.heads[1:]),
            nproc_per_node=setup.width,
            nodes_active=setup.nodes_active,
            drain_s=setup.drain_s,
            entry=("train.py",),
            log_dir="",
            timing=job.timing,
            checkpoint_dir="storage" if setup.durable_steps else None,
            checkpoint_interval_steps=setup.durable_steps,
            integrity_every_steps=setup.integrity,
        )
        self.agent: AgentModel
        self.loop.enter(self._boot, config)

    def _boot(self, config: AgentConfig) -> None:
        self.agent = AgentModel(self, config)
        self.agent.start()

    @property
    def keeper(self) -> KeeperModel:
        """The node's memory."""
        return cast(KeeperModel, self.agent.memory)

    @property
    def pool(self) -> PoolModel:
        """The node's processes."""
        return cast(PoolModel, self.agent.pool)

    @property
    def workers(self) -> list[WorkerModel]:
        """Processes that the agent counts on."""
        return [self.pool.models[process.number] for process in self.agent.workers.values()]

    async def unreachable(self, endpoints: Mapping[NodeId, Endpoint], timeout_s: float) -> tuple[NodeId, ...]:
        """Those to whom no connection can be made in time, in one direction or the other. A frozen host's kernel answers."""
        network, end = self.job.network, self.job.world.now + timeout_s
        ways = {node: max(network.open_at(self.id, node), network.open_at(node, self.id)) for node in endpoints}
        found = tuple(node for node, way in ways.items() if way > end or not self.job.nodes[node].alive)
        await asyncio.sleep(timeout_s if found else 0.001)
        return found

    def die(self, why: str, *, silent: bool = False, flushed: bool = False) -> None:
        """Agent, workers and memory end, all at once."""
        if not self.alive:
            return
        self.job.world.note(f"{self.id} is gone: {why}")
        if self.link is not None:
            if flushed:
                self.link.close()
            else:
                self.link.reset(silent=silent)
        self.alive, self.silent, self.loop.dead = False, silent, True
        for worker in self.pool.models.values():
            worker.exit(-9)
        self.job.world.after(NOTICED_S if silent else 0.01, self.keeper.lost)

    def freeze(self, seconds: float) -> None:
        """Everything on it stands still for a while (SIGSTOP, or a host that swaps); the kernel keeps its connections."""
        self.loop.freeze(seconds)
        for worker in self.pool.models.values():
            worker.execution.freeze(seconds)


class AgentModel(Agent):
    """Real, but for signals and the parts that touch the machine."""

    def __init__(self, model: NodeModel, config: AgentConfig) -> None:
        """As its process would."""
        self._model = model
        parts = Parts(
            memory=partial(KeeperModel, model),
            pool=partial(PoolModel, model),
            control=partial(ControlModel, model),
            last_words=lambda *_: cast(LastWords, SilentWords()),
            reach=model.unreachable,
        )
        super().__init__(config, model.id, parts)

    def start(self) -> None:
        """The beginning of ``run``."""
        self._exit = asyncio.get_running_loop().create_future()
        self.memory.start()
        self._spawn_task(self._serve())

    async def _serve(self) -> None:
        await self.memory.checkpoints.find()
        self._spawn_task(self.control.run())
        self._spawn_task(self._beat())

    def _fail(self, error: BaseException) -> None:
        self._model.loop.fail(error)

    def _on_plan(self, plan: m.Plan) -> None:
        if plan.generation == self.generation and self.plan is None:
            self._model.job.accepted(self.node, plan)
        super()._on_plan(plan)

    def _leave(self, exit_code: int) -> None:
        world = self._model.job.world
        world.after(0.0, partial(self._model.die, f"leaves with {exit_code}", flushed=True))


class SilentWords:
    """Nobody asks why a simulated worker has ended."""

    def add(self, *_: Any) -> None:
        """Nothing to read."""

    def give(self) -> None:
        """Nothing to say."""


class ControlModel(ControlChannel):
    """Real, but for the socket."""

    def __init__(
        self, model: NodeModel, config: AgentConfig, register: Callable[[], Any], receive: Callable[[Any], None]
    ) -> None:
        """As the agent makes it."""
        super().__init__(config, register, receive, model.loop.time)
        self._model = model

    async def _open(self, host: str, port: int) -> Any:
        self._model.link = await self._model.job.connect(self._model, host)
        return self._model.link


class LocalLink:
    """The agent's end of the socket pair to a worker."""

    def __init__(self, pipe: Pipe, files: dict[int, MemoryModel]) -> None:
        """*files*: memory by descriptor."""
        self._pipe = pipe
        self._files = files

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """To the worker; descriptors travel along."""
        self._pipe.send(CODEC.encode(message), [self._files[fd] for fd in fds])


class PoolModel(WorkerPool):
    """Starts modelled workers, and modelled processes that write checkpoints."""

    def __init__(self, model: NodeModel, *args: Any) -> None:
        """*args*: as the agent gives them."""
        super().__init__(*args)
        self._model = model
        self.models: dict[int, WorkerModel] = {}

    def spawn(self, slot: Slot, generation: Generation, *, rehearse: bool, master: str, nodes: int) -> WorkerProcess:
        """A new worker."""
        model, job = self._model, self._model.job
        route = (model.id, model.id)
        pid, slots = job.new_pid(), nodes * self._config.nproc_per_node
        worker = WorkerModel(
            job, model.id, slot, pid, slots=slots, rehearse=rehearse, on_end=partial(self._exited, pid)
        )
        link = LocalLink(Pipe(job.network, route, LOCAL_DELAY_S, worker.hear), job.files)
        process = WorkerProcess(slot=slot, link=cast(Any, link), number=pid)
        worker.up = Pipe(
            job.network,
            route,
            LOCAL_DELAY_S,
            partial(model.loop.enter, self._heard, process),
            partial(model.loop.enter, self._drained, process),
        )
        self.models[pid] = worker
        self._by_number[pid] = process
        return process

    def _heard(self, process: WorkerProcess, data: bytes) -> None:
        if process.drained:
            return
        try:
            self._on_message(process, CODEC.decode(data))
        except HotswapError as error:
            process.detail = str(error)
            self.kill(process)
            self._drained(process)

    def _drained(self, process: WorkerProcess) -> None:
        process.drained = True
        self._report_end(process)

    def _exited(self, pid: int, status: int) -> None:
        """The kernel tells the agent a moment later, before or after it has read what the worker said last."""
        world = self._model.job.world
        world.after(world.between(0.0005, 0.01), self._model.loop.enter, self._reaped, pid, status)

    def _reaped(self, pid: int, status: int) -> None:
        process = self._by_number.get(pid)
        if process is not None:
            process.status = status
            self._report_end(process)

    def kill(self, worker: WorkerProcess, signal_number: int = signal.SIGKILL) -> None:
        """End it; modelled workers say nothing of their progress, so nobody asks for their stacks."""
        assert signal_number == signal.SIGKILL, f"signal {signal_number} to a modelled worker"
        if worker.alive:
            self.models[worker.number].exit(-signal_number)

    def end_stopped(self) -> None:
        """Kill those that a signal has stopped for too long."""
        world, budget_s = self._model.job.world, self._config.timing.stopped_s
        for pid in list(self._by_number):
            since = self.models[pid].execution.stopped_since
            if since is not None and world.now - since > budget_s:
                self.kill(self._by_number[pid])

    def call(
        self, target: str, args: list[Any], fds: list[int], fd_names: list[str], done: Callable[[int], None]
    ) -> None:
        """The process that makes one snapshot durable. It reads the memory when it gets to it, at the latest when it is done."""
        job = self._model.job
        match = SHARD.search(args[0])
        assert match is not None, f"not a shard: {args[0]}"
        step, slot = int(match[1]), int(match[2])
        memory, shared_nbytes = job.files[fds[0]], int(args[2])
        job.moment("checkpoint")
        job.world.after(job.storage.delay_s(), self._write, memory, step, slot, shared_nbytes, done)

    def _write(
        self, memory: MemoryModel, step: int, slot: int, shared_nbytes: int, done: Callable[[int], None]
    ) -> None:
        if not self._model.alive:
            return
        state = read_state(memory, shared_nbytes)
        if state.step != step:
            raise Violation(f"the checkpoint of slot {slot} at step {step} is of {state}")
        generation = read_generation(memory, shared_nbytes)
        status = 0 if self._model.job.storage.write(step, slot, generation, state) else 1
        self._model.loop.enter(done, status)
