"""What goes wrong, and when: at a moment of the protocol, or just after so many seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotswap.sim.world import World

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel

MOMENTS = ("fencing", "rebuilding", "restoring", "redoing", "training", "push", "snapshot", "update", "time")
KINDS = ("node", "node", "node", "two nodes", "spare", "worker", "coordinator", "connection", "partition")


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


def draw(world: World, count: int) -> list[Fault]:
    """Random faults."""
    faults = []
    for _ in range(count):
        moment = world.dice.choice(MOMENTS)
        nth = world.dice.choice((1, 1, 2, 2, 3)) if moment in MOMENTS[:5] else world.dice.randint(1, 40)
        delay_s = (
            world.between(3.0, 40.0)
            if moment == "time"
            else world.dice.choice((0.0, 0.01, 0.1, 1.0)) * world.between(0.0, 1.0)
        )
        faults.append(Fault(kind=world.dice.choice(KINDS), moment=moment, nth=nth, delay_s=delay_s))
    return faults


class Saboteur:
    """Arms faults and lets them strike."""

    def __init__(self, job: JobModel, faults: list[Fault]) -> None:
        """Faults of the kind "time" are armed at once."""
        self._job = job
        self._armed = [fault for fault in faults if fault.moment != "time"]
        self.last_at = 0.0
        self.struck = 0
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
        job, world = self._job, self._job.world
        self.last_at, self.struck = world.now, self.struck + 1
        world.note(f"FAULT: {fault.kind}")
        members, spares = job.members(), job.spares()
        if fault.kind in ("node", "two nodes") and members:
            for victim in world.dice.sample(members, min(len(members), 1 if fault.kind == "node" else 2)):
                victim.die("node fault")
        elif fault.kind == "spare" and spares:
            world.dice.choice(spares).die("node fault")
        elif fault.kind == "worker":
            workers = [worker for agent in job.living() for worker in agent.workers.values()]
            if workers:
                world.dice.choice(workers).exit(-9)
        elif fault.kind == "coordinator":
            job.server.crash()
            world.after(world.between(0.05, 8.0), job.start_server)
        elif fault.kind in ("connection", "partition"):
            self._cut(fault.kind)

    def _cut(self, kind: str) -> None:
        job, world = self._job, self._job.world
        connected = [agent for agent in job.living() if agent.connection is not None]
        if not connected:
            return
        connection = world.dice.choice(connected).connection
        assert connection is not None, "only connected agents were chosen"
        world.note(f"{kind} of {connection.agent.node}")
        if kind == "connection":
            connection.cut()
        elif kind == "partition":
            connection.stall(world.between(1.0, 12.0))
