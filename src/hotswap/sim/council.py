"""Several coordinators and the store that they share, each on a host of its own: the real candidates, on loops in virtual time.

The store's single host stands for the majority of a cluster: who does not reach it reaches no majority.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hotswap.config import CoordinatorConfig
from hotswap.node.candidate import Candidate
from hotswap.node.leadership import CLOCK_MARGIN
from hotswap.sim.faults import STORE
from hotswap.sim.network import DELAY_S
from hotswap.sim.process import ProcessLoop
from hotswap.sim.server import ServerModel
from hotswap.store.port import Entry, Grant, Put, StoreUnavailable
from hotswap.store.table import Table

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel

T = TypeVar("T")
LATE_S = 10.0
"""So long after its sender has given it up a request may still arrive."""


class StoreModel:
    """One coordinator's way to the store: requests and answers take their time, and get lost where the network is cut."""

    def __init__(self, council: Council, host: str, timeout_s: float) -> None:
        """*host* is the coordinator's."""
        self._council = council
        self._host = host
        self._timeout_s = timeout_s

    async def grant(self, ttl_s: float) -> Grant:
        """As the port says."""
        return Grant(lease=await self._ask(lambda table, now: table.grant(ttl_s, now)), ttl_s=ttl_s)

    async def keep(self, lease: int) -> float:
        """As the port says."""
        return await self._ask(lambda table, now: table.keep(lease, now))

    async def revoke(self, lease: int) -> None:
        """As the port says."""
        await self._ask(lambda table, now: table.revoke(lease, now))

    async def get(self, key: str) -> Entry | None:
        """As the port says."""
        return await self._ask(lambda table, now: table.get(key, now))

    async def commit(self, guards: Mapping[str, int], puts: Sequence[Put]) -> int | None:
        """As the port says."""
        return await self._ask(lambda table, now: table.commit(guards, puts, now))

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _ask(self, call: Callable[[Table, float], T]) -> T:
        council, loop = self._council, asyncio.get_running_loop()
        world, network = council.job.world, council.job.network
        answer: asyncio.Future[T] = loop.create_future()

        def arrive() -> None:
            """The request is served, whether or not anybody still waits for the answer."""
            if world.now < council.store_down_to:
                return
            said = call(council.table, council.store_time())
            back = network.open_at(STORE, self._host) + world.between(*DELAY_S)
            world.at(back, cast(ProcessLoop, loop).enter, deliver, said)

        def deliver(said: T) -> None:
            if not answer.done():
                answer.set_result(said)

        at = network.open_at(self._host, STORE) + world.between(*DELAY_S)
        if at < world.now + self._timeout_s + LATE_S:
            world.at(at, arrive)
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except asyncio.TimeoutError:
            raise StoreUnavailable("no answer from the store") from None


class CandidateModel(Candidate):
    """Real, but for sockets and signals."""

    def __init__(self, council: Council, loop: ProcessLoop, config: CoordinatorConfig, host: str) -> None:
        """Of the process that *loop* is."""
        self.loop = loop
        store = StoreModel(council, host, config.timing.store_s)
        super().__init__(config, store, lambda *given: ServerModel(council.job, loop, *given), loop.time)

    async def _open(self, sock: Any) -> Any:
        return sock


class Council:
    """All of them. ``rate``: how fast the store's clock runs, as seen by the coordinators'."""

    def __init__(self, job: JobModel, count: int, dice: random.Random) -> None:
        """*dice*: for what is not decided by the job's own."""
        self.job = job
        self.hosts = [f"head{number}" for number in range(1, count + 1)]
        self.rate = dice.uniform(1 - CLOCK_MARGIN / 2, 1 + CLOCK_MARGIN / 2)
        self.table = Table()
        self.store_down_to = 0.0
        self.candidates: dict[str, CandidateModel] = {}
        self._begun: set[str] = set()
        self._newest = 0

    def store_time(self) -> float:
        """The store's clock."""
        return self.job.world.now * self.rate

    def start(self) -> None:
        """Start every coordinator that is not there."""
        for host in self.hosts:
            if host not in self.candidates:
                config = self.job.coordinator_config(restarted=host in self._begun, store=True)
                self._begun.add(host)
                loop = self.job.new_loop(host)
                loop.enter(self._boot, host, loop, config)

    def _boot(self, host: str, loop: ProcessLoop, config: CoordinatorConfig) -> None:
        self.candidates[host] = candidate = CandidateModel(self, loop, config, host)
        loop.create_task(candidate.live((host, 1))).add_done_callback(lambda task: self._left(host, loop, task))

    def _left(self, host: str, loop: ProcessLoop, task: asyncio.Task[int | None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.fail(error)
        elif not task.cancelled() and (code := task.result()) is not None:
            self.job.world.note(f"the coordinator on {host} leaves with {code}")
            self.job.told(code)

    def crash(self, host: str) -> None:
        """Its process is gone, with all connections."""
        candidate = self.candidates.pop(host, None)
        if candidate is not None:
            self.job.world.note(f"the coordinator on {host} crashes")
            self.job.reset_connections(candidate.loop)
            candidate.loop.dead = True

    def leader(self) -> str:
        """Who leads, or one of those who might."""
        leading = [host for host, candidate in self.candidates.items() if candidate.server is not None]
        return self.job.world.dice.choice(leading or self.hosts)

    def decides(self, term: int) -> str:
        """The leader of *term* lets a decision out; what is wrong with that, if anything."""
        if term < self._newest:
            return f"the leader of term {term} decides after that of term {self._newest}"
        self._newest = term
        return ""
