"""What goes wrong, and when: at a moment of the protocol, or just after so many seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotswap.core.events import Advice, Judged
from hotswap.core.types import host_of
from hotswap.sim.memory import spoil
from hotswap.sim.world import World

STORE = "store"
"""The host of the coordinators' store."""

if TYPE_CHECKING:
    from hotswap.sim.council import Council
    from hotswap.sim.job import JobModel
    from hotswap.sim.worker import WorkerModel

PHASES = ("fencing", "rebuilding", "restoring", "redoing", "training")
MOMENTS = (*PHASES, "push", "snapshot", "update", "checkpoint", "halt", "time")
KINDS = {
    "node": 4,
    "power": 2,
    "two nodes": 2,
    "rack": 1,
    "spare": 2,
    "drain": 3,
    "worker": 3,
    "stopped worker": 1,
    "deadlock": 1,
    "frozen node": 2,
    "coordinator": 3,
    "connection": 2,
    "partition": 2,
    "one-way partition": 2,
    "partition of two": 2,
    "slow storage": 1,
    "full storage": 1,
    "rotten replica": 1,
    "verdict": 2,
}
"""What can go wrong, and how often in relation to the others."""
AMONG_SEVERAL = {
    "coordinator": 3,
    "frozen leader": 2,
    "all coordinators": 1,
    "leader without store": 3,
    "leader without agents": 2,
    "leader without some agents": 2,
    "store": 1,
}
"""What can go wrong beside that where there are several coordinators."""


@dataclass(kw_only=True)
class Fault:
    """``kind`` strikes a little after the *nth* ``moment``, or after ``delay_s`` alone if that is "time"."""

    kind: str
    moment: str
    nth: int
    delay_s: float

    def __str__(self) -> str:
        """For transcripts."""
        when = "" if self.moment == "time" else f"the {self.nth}. '{self.moment}' and "
        return f"{self.kind} after {when}{self.delay_s:.3f} s"


def draw(world: World, count: int, kinds: Mapping[str, int] = KINDS) -> list[Fault]:
    """Random faults."""
    faults = []
    for _ in range(count):
        moment = world.dice.choice(MOMENTS)
        nth = world.dice.choice((1, 1, 2, 2, 3)) if moment in PHASES else world.dice.randint(1, 40)
        delay_s = (
            world.between(3.0, 40.0)
            if moment == "time"
            else world.dice.choice((0.0, 0.01, 0.1, 1.0)) * world.between(0.0, 1.0)
        )
        kind = world.dice.choices(list(kinds), list(kinds.values()))[0]
        faults.append(Fault(kind=kind, moment=moment, nth=nth, delay_s=delay_s))
    return faults


class Saboteur:
    """Arms faults and lets them strike."""

    def __init__(self, job: JobModel, faults: list[Fault]) -> None:
        """Faults of the kind "time" are armed at once."""
        self._job = job
        self._armed = [fault for fault in faults if fault.moment != "time"]
        self.last_at = 0.0
        self.struck: Counter[str] = Counter()
        for fault in faults:
            job.world.note(f"armed: {fault}")
            if fault.moment == "time":
                job.world.after(fault.delay_s, self._strike, fault)

    def moment(self, name: str) -> None:
        """A moment of the protocol has come."""
        for fault in list(self._armed):
            if fault.moment == name:
                fault.nth -= 1
                if fault.nth == 0:
                    self._armed.remove(fault)
                    self._job.world.after(fault.delay_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        world = self._job.world
        self.struck[fault.kind] += 1
        self._lasts(0.0)
        world.note(f"FAULT: {fault.kind}")
        getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))()

    def _lasts(self, seconds: float) -> float:
        """The fault is over after so many seconds."""
        self.last_at = max(self.last_at, self._job.world.now + seconds)
        return seconds

    # --- processes and hosts -----------------------------------------------------------------------------------------

    def _kill(self, count: int, *, silent: bool = False) -> None:
        members = self._job.members()
        for victim in self._job.world.dice.sample(members, min(len(members), count)):
            victim.die("node fault", silent=silent)

    def _node(self) -> None:
        self._kill(1)

    def _power(self) -> None:
        self._kill(1, silent=True)

    def _two_nodes(self) -> None:
        self._kill(2)

    def _rack(self) -> None:
        nodes = [node for node in self._job.living() if self._job.domain_of(node.id)]
        if nodes:
            rack = self._job.domain_of(self._job.world.dice.choice(nodes).id)
            for victim in [node for node in nodes if self._job.domain_of(node.id) == rack]:
                victim.die(f"{rack} fails")

    def _rotten_replica(self) -> None:
        """A node is lost, and the newest replicas that one of its holders has of it are not what they were."""
        victim = self._job.world.dice.choice(self._job.members() or [None])
        slots = [worker.slot for worker in victim.workers] if victim is not None else []
        holders = [node for node in self._job.living() if node is not victim and node.keeper.replicas(slots)]
        if victim is not None and holders:
            holder = self._job.world.dice.choice(holders)
            self._job.world.note(f"what {holder.id} holds of {victim.id} rots")
            for memory in holder.keeper.replicas(slots):
                spoil(memory)
            # For all that it has of others it might as well be lost.
            self._job.chronicle.rotten.add(holder.id)
            victim.die("node fault")

    def _spare(self) -> None:
        spares = self._job.spares()
        if spares:
            self._job.world.dice.choice(spares).die("node fault")

    def _drain(self) -> None:
        """A notice: no fault, but it comes when it wants, and the node is gone when it says."""
        nodes = self._job.living()
        if nodes:
            node = self._job.world.dice.choice(nodes)
            self._job.world.note(f"{node.id} is to leave within {self._lasts(self._job.setup.drain_s):g} s")
            node.loop.enter(node.agent.departure.begin, "notice")

    def _worker(self) -> None:
        for worker in self._some_worker():
            worker.exit(-9)

    def _stopped_worker(self) -> None:
        for worker in self._some_worker():
            self._job.world.note(f"{worker.name} is stopped")
            worker.execution.stop()

    def _deadlock(self) -> None:
        """Found by its peers, in a collective that it never enters. So one must be left, and both must train."""
        stuck = any(worker.execution.stuck for node in self._job.living() for worker in node.workers)
        for worker in self._some_worker():
            if (
                worker.generation
                and worker.step < self._job.setup.steps
                and not stuck
                and self._job.chronicle.slots > 1
            ):
                self._job.world.note(f"the main thread of {worker.name} hangs")
                worker.execution.stuck = True

    def _some_worker(self) -> list[WorkerModel]:
        workers = [worker for node in self._job.living() for worker in node.workers if worker.alive]
        return [self._job.world.dice.choice(workers)] if workers else []

    def _frozen_node(self) -> None:
        nodes = self._job.living()
        if nodes:
            node = self._job.world.dice.choice(nodes)
            seconds = self._lasts(self._job.world.between(0.5, 12.0))
            self._job.world.note(f"{node.id} stands still for {seconds:.3f} s")
            node.freeze(seconds)

    def _coordinator(self) -> None:
        world = self._job.world
        self._job.crash_server()
        world.after(
            self._lasts(world.between(*world.dice.choice(((0.05, 8.0), (0.05, 8.0), (30.0, 90.0))))), self._restart
        )

    def _all_coordinators(self) -> None:
        world, council = self._job.world, self._council
        for host in list(council.candidates):
            council.crash(host)
        world.after(self._lasts(world.between(0.05, 30.0)), self._restart)

    def _frozen_leader(self) -> None:
        """As long as another one may lead before it goes on, or not as long."""
        council, host = self._council, self._council.leader()
        if host in council.candidates:
            seconds = self._lasts(self._job.world.between(0.5, 12.0))
            self._job.world.note(f"{host} stands still for {seconds:.3f} s")
            council.candidates[host].loop.freeze(seconds)

    @property
    def _council(self) -> Council:
        assert self._job.council is not None, "there is one coordinator"
        return self._job.council

    def _leader_without_store(self) -> None:
        """In both directions, or only one: a request may take effect that nobody learns of."""
        self._cut_leader([STORE], self._job.world.dice.choice(("both", "there", "back")))

    def _leader_without_agents(self) -> None:
        self._cut_leader([node.id for node in self._job.living()], "both")

    def _leader_without_some_agents(self) -> None:
        """And with the others, on the side of the network where the store is not."""
        nodes = [node.id for node in self._job.living()]
        self._cut_leader([STORE, *self._job.world.dice.sample(nodes, len(nodes) // 2)], "both")

    def _cut_leader(self, others: list[str], ways: str) -> None:
        network, host = self._job.network, self._council.leader()
        seconds = self._lasts(self._job.world.between(1.0, 15.0))
        self._job.world.note(f"{host} from {others}, {ways}, for {seconds:.3f} s")
        for other in others:
            if ways in ("both", "there"):
                network.shut(host, other, seconds)
            if ways in ("both", "back"):
                network.shut(other, host, seconds)

    def _store(self) -> None:
        council, world = self._council, self._job.world
        council.store_down_to = world.now + self._lasts(world.between(1.0, 20.0))

    def _restart(self) -> None:
        self._job.start_server()

    def _verdict(self) -> None:
        """Right or wrong: whatever is said of a node, the job must get over it."""
        nodes, server = self._job.living(), self._job.server
        if nodes and server is not None:
            dice = self._job.world.dice
            node, advice = dice.choice(nodes).id, dice.choice((Advice.EXCLUDE, Advice.EXCLUDE, Advice.AVOID))
            self._job.world.note(f"a verdict: {advice.value} {node}")
            judged = Judged(advice=advice, host=host_of(node), reason="so it was drawn")
            server.loop.enter(server.take_advice, judged)

    # --- network -----------------------------------------------------------------------------------------------------

    def _connection(self) -> None:
        nodes = [node for node in self._job.living() if node.link is not None and not node.link.closed]
        if nodes:
            node = self._job.world.dice.choice(nodes)
            self._job.world.note(f"connection of {node.id}")
            assert node.link is not None, "only connected nodes were chosen"
            node.link.reset()

    def _partition(self) -> None:
        for node, seconds in self._some_node():
            self._job.network.shut(node, "*", seconds)
            self._job.network.shut("*", node, seconds)

    def _one_way_partition(self) -> None:
        for node, seconds in self._some_node():
            ends = [node, self._job.world.dice.choice(("*", self._job.heads[0]))]
            self._job.world.dice.shuffle(ends)
            self._job.world.note(f"from {ends[0]} to {ends[1]}")
            self._job.network.shut(ends[0], ends[1], seconds)

    def _partition_of_two(self) -> None:
        nodes = self._job.living()
        if len(nodes) > 1:
            first, second = self._job.world.dice.sample([node.id for node in nodes], 2)
            seconds = self._lasts(self._job.world.between(1.0, 12.0))
            self._job.world.note(f"{first} and {second} for {seconds:.3f} s")
            self._job.network.shut(first, second, seconds)
            self._job.network.shut(second, first, seconds)

    def _some_node(self) -> list[tuple[str, float]]:
        nodes = self._job.living()
        if not nodes:
            return []
        node, seconds = self._job.world.dice.choice(nodes).id, self._lasts(self._job.world.between(1.0, 12.0))
        self._job.world.note(f"{node} for {seconds:.3f} s")
        return [(node, seconds)]

    # --- storage -----------------------------------------------------------------------------------------------------

    def _slow_storage(self) -> None:
        self._job.storage.slow_to = self._job.world.now + self._lasts(self._job.world.between(5.0, 60.0))

    def _full_storage(self) -> None:
        self._job.storage.full_to = self._job.world.now + self._lasts(self._job.world.between(5.0, 60.0))
