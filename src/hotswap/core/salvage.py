"""Before a job gives up for want of a node: what is left in memory goes to storage, and the next run, or a smaller job, goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotswap.core import messages as m
from hotswap.core import resize, resume
from hotswap.core.ladder import FEWER
from hotswap.core.types import NodeId, Slot, Source, Step

if TYPE_CHECKING:
    from hotswap.core.job import Job


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """The state of *step* is being written until *until*, in seconds; then the job ends for *reason*."""

    step: Step
    until: float
    reason: str


def begin(job: Job, reason: str, now: float) -> bool:
    """Whether the wait goes on, for the newest state that is whole in the memories of nodes that are there."""
    if not job.limits.checkpoints or job.rescue is not None:
        return False
    ledger = job.attempt.ledger(job.current, job.peers, job.suspicion)
    # What a process has in its hands cannot be written by its agent.
    ledger.live.clear()
    choice = resume.choose(job.current.slots, ledger)
    known = max(job.durable_step, -1 if (step := job.attempt.checkpoint_step()) is None else step)
    if choice is None or choice.step <= known:
        return False
    writers: dict[NodeId, dict[Slot, Source]] = {}
    for slot, source in choice.sources.items():
        node = source.unique_from or job.current.node_of(slot)
        writers.setdefault(node, {})[slot] = source
    job.rescue = Rescue(step=choice.step, until=now + job.limits.phase_s, reason=reason)
    job.record("rescue_started", {"step": choice.step, "reason": reason})
    for node, sources in writers.items():
        job.send(node, m.Salvage(generation=job.current.generation, step=choice.step, sources=sources))
    return True


def awaits(job: Job, step: Step) -> bool:
    """Whether shards of *step* count whoever has written them: a lost slot's comes from its holder."""
    return job.rescue is not None and step == job.rescue.step


def on_checkpoint(job: Job, step: Step, now: float) -> None:
    """The durable checkpoint of *step* counts: if it is the one, the job goes on from there with fewer nodes, or ends."""
    if job.rescue is None or step != job.rescue.step:
        return
    reason = job.rescue.reason
    if not resize.shrink(job, reason, now):
        job.stop(FEWER.code, f"{reason}; the state of step {step} is on storage")
