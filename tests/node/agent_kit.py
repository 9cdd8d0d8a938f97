"""An agent between a scripted coordinator and scripted workers: all real but the worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.types import Endpoint, Source, SourceKind
from hotswap.errors import PeerUnreachable
from hotswap.node.agent import Agent
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.spawn import Exited, SpawnRequest
from hotswap.session.settings import STACKS_SIGNAL
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import control_codec, worker_codec
from hotswap.wire.handshake import accept_link
from hotswap.wire.links import AsyncLink

TOKEN = "0123456789abcdef0123456789abcdef"
DEADLINE_S = 10.0
M = TypeVar("M")


def settings(directory: Path, **changes: Any) -> AgentConfig:
    """A node called ``a`` that has one slot of two."""
    config = AgentConfig(
        job_id="job",
        token=TOKEN,
        node="a",
        coordinator_port=1,
        nproc_per_node=1,
        nodes_active=2,
        entry=("train.py",),
        log_dir=str(directory),
    )
    return replace(config, **changes)


async def first(link: AsyncLink[Any], kind: type[M]) -> M:
    while True:
        message = await link.receive()
        if isinstance(message, kind):
            return message


async def nothing(link: AsyncLink[Any], kind: type[Any], for_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        raise AssertionError(await asyncio.wait_for(first(link, kind), for_s))


async def until(condition: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < end, "deadline"
        await asyncio.sleep(0.002)


class Worker:
    """What the test says in a worker's place."""

    def __init__(self, request: SpawnRequest, sock: socket.socket, number: int, stacks: int) -> None:
        self.request = request
        self.slot = int(request.env["HOTSWAP_SLOT"])
        self.number = number
        self.stacks = stacks
        self.link: AsyncLink[Any] = AsyncLink(sock, worker_codec())
        self.signals: list[int] = []

    def say(self, message: Any) -> None:
        self.link.send(message)

    async def hear(self, kind: type[M]) -> M:
        """The next message of that type; others are passed over."""
        return await asyncio.wait_for(first(self.link, kind), DEADLINE_S)

    async def silent(self, kind: type[Any], for_s: float = 0.1) -> None:
        """No message of that type comes."""
        await nothing(self.link, kind, for_s)

    def park(self, generation: int, step: int = 0, *, dirty: bool = False, torn: bool = False) -> None:
        self.say(w.Parked(generation=generation, step=step, dirty=dirty, torn=torn, groups={}))


class ScriptedSpawner:
    """Starts nothing; the test decides when a process ends."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.obeys_sigterm = True
        self.on_stacks: Callable[[Worker], object] = lambda _: None
        self.pid_of_all = 0
        self.gone = False
        self._exited: deque[Exited] = deque()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive: set[int] = set()

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        number = len(self.workers)
        self.workers.append(Worker(request, socket.socket(fileno=os.dup(fds[0])), number, os.dup(fds[1])))
        self._alive.add(number)
        return number

    def pid(self, number: int) -> int:
        return self.pid_of_all

    def fileno(self) -> int:
        return self._news

    def poll(self) -> list[Exited]:
        if self.gone:
            raise PeerUnreachable("the fork server is gone")
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        found = list(self._exited)
        self._exited.clear()
        return found

    def kill(self, number: int, signal_number: int) -> None:
        worker = self.workers[number]
        worker.signals.append(signal_number)
        if signal_number == STACKS_SIGNAL:
            self.on_stacks(worker)
        elif signal_number == 9 or self.obeys_sigterm:
            self.end(worker, -signal_number)

    def end(self, worker: Worker, status: int) -> None:
        """The process ends; what it said before is still on its way."""
        if worker.number in self._alive:
            self._alive.discard(worker.number)
            asyncio.get_running_loop().create_task(self._finish(worker, status))

    async def _finish(self, worker: Worker, status: int) -> None:
        await worker.link.flush(DEADLINE_S)
        worker.link.close()
        self._exited.append(Exited(number=worker.number, status=status))
        os.eventfd_write(self._news, 1)

    def break_off(self) -> None:
        """The fork server dies."""
        self.gone = True
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        for worker in self.workers:
            worker.link.close()
            os.close(worker.stacks)
        os.close(self._news)


@dataclass(kw_only=True)
class Bench:
    """The agent and the test's side of it."""

    config: AgentConfig
    agent: Agent
    spawner: ScriptedSpawner
    listener: socket.socket
    running: asyncio.Task[int]
    link: AsyncLink[Any] | None = None
    peer: MemoryKeeper | None = None

    async def register(self) -> m.Register:
        """Accept the agent's connection."""
        sock, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(self.listener), DEADLINE_S)
        try:
            self.link = await accept_link(sock, control_codec(), TOKEN, DEADLINE_S)
        except BaseException:
            sock.close()
            raise
        message = await asyncio.wait_for(self.link.receive(), DEADLINE_S)
        assert isinstance(message, m.Register)
        return message

    def tell(self, message: Any) -> None:
        assert self.link is not None
        self.link.send(message)

    async def hear(self, kind: type[M]) -> M:
        """The agent's next message of that type; others are passed over."""
        assert self.link is not None
        return await asyncio.wait_for(first(self.link, kind), DEADLINE_S)

    async def silent(self, kind: type[Any], for_s: float = 0.1) -> None:
        """No message of that type comes."""
        assert self.link is not None
        await nothing(self.link, kind, for_s)

    def drop(self) -> None:
        """The coordinator dies."""
        assert self.link is not None
        self.link.close()

    def fence(self, generation: int, places: tuple[str, ...] = ("a#1", "b#1"), **fields: Any) -> None:
        endpoints = {"a#1": self.agent.memory.endpoint, "b#1": self.peers_endpoint}
        self.tell(m.Fence(generation=generation, places=places, endpoints=endpoints, **fields))
        if self.peer is not None:
            self.peer.fence(generation)

    @property
    def peers_endpoint(self) -> Endpoint:
        return self.peer.endpoint if self.peer is not None else Endpoint(host="127.0.0.1", port=1)

    def plan(self, generation: int, step: int, source: Source, *, holder: str = "b#1", push: bool = True) -> None:
        plan = m.Plan(
            generation=generation,
            resume_step=step,
            sources={0: source},
            holders={0: (holder,)} if holder else {},
            push={0: (holder,)} if push and holder else {},
        )
        self.tell(plan)

    async def worker(self, index: int) -> Worker:
        """The *index*-th process that was started."""
        await until(lambda: len(self.spawner.workers) > index)
        return self.spawner.workers[index]

    async def built_worker(self, generation: int = 1) -> Worker:
        """Fence into *generation* and have a worker that waits for its plan."""
        await self.register()
        self.fence(generation)
        worker = await self.worker(0)
        await self.hear(m.NodeFenced)
        worker.say(w.Joined())
        worker.say(w.Built(shape="s", peers=(), rehearsed=False))
        worker.park(generation)
        await self.hear(m.WorkerBuilt)
        return worker

    async def training_worker(self, step: int = 0, nbytes: int = 100) -> Worker:
        """As far as a worker that trains from *step* in generation 1, its snapshot held by the peer."""
        worker = await self.built_worker()
        self.plan(1, step, Source(kind=SourceKind.FRESH))
        await worker.hear(w.Load)
        worker.say(w.Connected(generation=1))
        worker.say(w.Reserve(nbytes=nbytes, buffers=2))
        granted = await worker.hear(w.Granted)
        self.snapshot(worker, 1, step, granted.free, nbytes)
        worker.say(w.Restored(generation=1, step=step))
        await self.hear(m.WorkerReady)
        self.tell(m.Go(generation=1))
        await worker.hear(m.Go)
        return worker

    def snapshot(self, worker: Worker, generation: int, step: int, buffer: int, nbytes: int) -> None:
        """Write as the worker would."""
        worker.say(w.SnapshotBegin(buffer=buffer))
        view = self.agent.memory.buffers(worker.slot)[buffer].view()
        view[:nbytes] = bytes([step + 1]) * nbytes
        worker.say(
            w.SnapshotDone(generation=generation, step=step, buffer=buffer, shared_nbytes=0, unique_nbytes=nbytes)
        )


@contextlib.asynccontextmanager
async def bench(directory: Path, patch: pytest.MonkeyPatch, **changes: Any) -> AsyncIterator[Bench]:
    """An agent that has been started and waits for its coordinator; ended when the block is left."""
    spawner = ScriptedSpawner()
    patch.setattr("hotswap.node.workers.ExecSpawner", lambda: spawner)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        config = settings(directory, coordinator_port=listener.getsockname()[1], **changes)
        agent = Agent(config, f"{config.node}#1")
        running = asyncio.create_task(agent.run())
        made = Bench(config=config, agent=agent, spawner=spawner, listener=listener, running=running)
        try:
            yield made
        finally:
            agent._leave(0)
            await asyncio.wait_for(running, DEADLINE_S)
            if made.link is not None:
                made.link.close()
            if made.peer is not None:
                made.peer.close()
            # Links free their descriptors when the loop has looked at them once more.
            await asyncio.sleep(0.01)


def holder(directory: Path) -> MemoryKeeper:
    """The memory of node ``b``."""

    def ignore(*_: object) -> None:
        pass

    keeper = MemoryKeeper(settings(directory, node="b"), "b#1", ignore, ignore, ignore, ignore)
    keeper.start()
    return keeper


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run *scenario* to its end, with a deadline for all of it."""
    asyncio.run(asyncio.wait_for(scenario, 3 * DEADLINE_S))
