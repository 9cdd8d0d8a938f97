"""Drills: faults that somebody orders on a running job, one at a time, and whom each of them strikes.

What follows is an ordinary loss: nothing in a job knows that it was ordered, but the event log.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from hotswap.core.commands import Inject
from hotswap.core.job import Job
from hotswap.core.transitions import Phase
from hotswap.core.types import NodeId, Role, Slot, host_of, names_of


class Victim(str, Enum):
    """What is struck."""

    WORKER = "worker"
    """The process of a slot."""
    NODE = "node"
    """An agent and all its workers."""
    AGENT = "agent"
    COORDINATOR = "coordinator"
    """The one that leads."""


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One fault. ``number``: the signal with which it is made."""

    victim: Victim
    number: signal.Signals
    what: str

    @property
    def fatal(self) -> bool:
        """Whether an agent that is struck speaks no more."""
        return self.number in (signal.SIGKILL, signal.SIGSTOP)


SPARE = "spare"
DRAIN = "drain"
_KILL = signal.SIGKILL
DRILLS = {
    "worker": Drill(victim=Victim.WORKER, number=_KILL, what="the process of a slot is killed"),
    "segv-worker": Drill(victim=Victim.WORKER, number=signal.SIGSEGV, what="the process of a slot crashes"),
    "abort-worker": Drill(victim=Victim.WORKER, number=signal.SIGABRT, what="the process of a slot aborts"),
    "stop-worker": Drill(victim=Victim.WORKER, number=signal.SIGSTOP, what="the process of a slot is stopped for ever"),
    "node": Drill(victim=Victim.NODE, number=_KILL, what="all processes of a node are killed"),
    SPARE: Drill(victim=Victim.NODE, number=_KILL, what="the same, of a node that does not train"),
    "stop-node": Drill(victim=Victim.NODE, number=signal.SIGSTOP, what="all processes of a node fall silent"),
    "agent": Drill(victim=Victim.AGENT, number=_KILL, what="a node's agent is killed, and its workers with it"),
    DRAIN: Drill(victim=Victim.AGENT, number=signal.SIGUSR1, what="a node is told to leave, as by a scheduler"),
    "coordinator": Drill(victim=Victim.COORDINATOR, number=_KILL, what="the coordinator is killed"),
}
"""By the names that users give."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Who has to strike: the agent of ``node``, or if that is empty the coordinator itself. ``refusal``: why nobody."""

    node: NodeId = ""
    slot: Slot = -1
    refusal: str = ""


def aim(job: Job, order: Inject) -> Aim:
    """Where *order* strikes, as *job* stands now."""
    drill = DRILLS.get(order.fault)
    if drill is None:
        return Aim(refusal=f"there is no fault {order.fault!r} here; there are {', '.join(DRILLS)}")
    if job.phase is Phase.STOPPED:
        return Aim(refusal="the job has ended")
    if drill.victim is Victim.COORDINATOR:
        return Aim()
    return _at_worker(job, order.slot) if drill.victim is Victim.WORKER else _at_node(job, order)


def _at_worker(job: Job, slot: Slot) -> Aim:
    if not job.running:
        return Aim(refusal=f"no slot has a place while the job is {job.phase.value}; try again when it trains")
    slots = job.current.slots
    if slot not in slots:
        said = "say which one" if slot < 0 else f"there is no slot {slot}"
        return Aim(refusal=f"{said}: --slot {slots[0]} to {slots[-1]}")
    node = job.current.node_of(slot)
    if node not in job.roster:
        return Aim(refusal=f"slot {slot} was on {node}, which is gone; try again when another node has its place")
    return Aim(node=node, slot=slot)


def _at_node(job: Job, order: Inject) -> Aim:
    there = names_of([*job.roster]) or "none"
    named = [node for node in job.roster if order.node in (node, host_of(node))]
    if not named:
        said = f"there is no node {order.node!r}" if order.node else "say which node"
        return Aim(refusal=f"{said}: --node, one of {there}")
    if len(named) > 1:
        return Aim(refusal=f"{order.node} has several: say which one, --node {' or '.join(named)}")
    [node] = named
    if order.fault == SPARE and job.role(node) is Role.ACTIVE:
        return Aim(refusal=f"{node} trains and is no spare; to strike it all the same: hotswap inject ... node")
    if order.fault == DRAIN and node in job.roster.leaving:
        return Aim(refusal=f"{node} is on its way out already")
    return Aim(node=node)
