"""Nodes that are told to leave: a spare takes the place of each while it still trains, at a step boundary, and then it may go.

All workers halt at the same boundary, which they agree on at the commit gate, so nothing is done again. Whatever comes in
between is an ordinary loss, and any recovery that begins meanwhile does the swap as well. A node that nobody can replace
before its time is up is let go: after a durable checkpoint, if there is storage, and then the job waits for a node.
"""

from __future__ import annotations

from hotswap.core import messages as m
from hotswap.core import resize
from hotswap.core.events import Fields
from hotswap.core.job import Job
from hotswap.core.recovery import Halt
from hotswap.core.types import NodeId, Step, node_order


def on_register(job: Job, node: NodeId, message: m.Register, now: float) -> None:
    """A node may have been told to leave while another coordinator led, or none did."""
    if message.leaves_in_s is not None:
        ask(job, node, m.NodeDraining(leaves_in_s=message.leaves_in_s, reason="told to before"), now)


def ask(job: Job, node: NodeId, message: m.NodeDraining, now: float) -> None:
    """*node* has to leave."""
    if node in job.roster.leaving:
        return
    left_s = message.leaves_in_s
    job.roster.leave(node, now + left_s)
    fields: Fields = {"node": node, "role": job.role(node).value, "reason": message.reason, "left_s": round(left_s, 1)}
    job.record("node_draining", fields)


def look(job: Job) -> None:
    """While training: send off who is not needed, and get ready for the others to be replaced. May be done at any time."""
    for node in list(job.roster.leaving):
        if not job.needs(node):
            job.release(node, "not needed any more; this node may go")
    if not job.roster.leaving or job.halt is not None:
        return
    if _can_be_replaced(job):
        _halt(job, durable=False)
        return
    for spare in job.roster.prepare([job.current.places.index(node) for node in _members(job)]):
        job.send(spare, job.fence_message(spare))


def on_halted(job: Job, message: m.WorkerHalted, now: float) -> None:
    """A worker stands at the boundary; its snapshot is in two places."""
    if job.halt is None:
        return  # Ordered by an earlier coordinator; they go on after a while.
    job.halt.slots.add(message.slot)
    job.halt.step = message.step
    if job.halt.first_at is None:
        job.halt.first_at = now
    if job.halt.durable:
        _let_go_if_durable(job, now)
    elif job.halt.slots | job.finished >= {*job.current.slots}:
        _swap(job, now)


def on_checkpoint(job: Job, step: Step, now: float) -> None:
    """The durable checkpoint of *step* counts."""
    job.durable_step = step
    _let_go_if_durable(job, now)


def deadline(job: Job) -> float:
    """When ``on_tick`` has something to do, at the latest."""
    due = list(job.roster.leaving.values())
    if job.halt is not None and job.halt.first_at is not None and not job.halt.durable:
        due.append(job.halt.first_at + job.limits.halt_s)
    return min(due, default=float("inf"))


def on_tick(job: Job, now: float) -> None:
    """While training: somebody is late at the boundary, or a node has to leave now."""
    halt = job.halt
    if halt is not None and halt.first_at is not None and not halt.durable and now >= halt.first_at + job.limits.halt_s:
        _swap(job, now)
    elif overdue := job.roster.overdue(now):
        _on_overdue(job, overdue, now)


def _members(job: Job) -> list[NodeId]:
    return [node for node in job.current.places if node in job.roster.leaving]


def _can_be_replaced(job: Job) -> bool:
    """Whether a swap would free at least one of them: by a spare that is built for its place, or another keeper of replicas."""
    members = _members(job)
    if not members:
        return bool(job.spares())
    hurt = [job.current.places.index(node) for node in members]
    return bool(job.roster.fill(job.current, dead=[], hurt=hurt))


def _halt(job: Job, *, durable: bool) -> None:
    job.halt = Halt(durable=durable)
    job.record("halt_asked", {"nodes": [*_leaving(job)], "durable": durable})
    for node in job.current.places:
        job.send(node, m.Halt(generation=job.current.generation, durable=durable))


def _swap(job: Job, now: float) -> None:
    job.recover(f"{', '.join(_leaving(job))} to be replaced before leaving", now)


def _let_go_if_durable(job: Job, now: float) -> None:
    if job.halt is not None and job.halt.grows:
        resize.grow_if_durable(job, now)
    elif job.halt is not None and job.halt.durable and job.durable_step == job.halt.step:
        _let_go(job, now)


def _on_overdue(job: Job, overdue: list[NodeId], now: float) -> None:
    """Their time is up: with a spare that has still to be built rather than with none; else a checkpoint, and let them go."""
    if job.spares():
        job.recover(f"{', '.join(overdue)} cannot stay any longer", now)
    elif job.limits.checkpoints and (job.halt is None or not job.halt.durable or job.halt.grows):
        for node in overdue:
            job.roster.leave(node, now + job.limits.phase_s)
        _halt(job, durable=True)
    else:
        _let_go(job, now)


def _let_go(job: Job, now: float) -> None:
    """Without a replacement. What only they hold has another copy, or the durable checkpoint; who can wait longer stays."""
    gone = job.roster.overdue(now + (job.limits.phase_s if job.halt is not None and job.halt.durable else 0.0))
    for node in gone:
        job.release(node, "no spare came before it had to leave")
    job.recover(f"{', '.join(gone)} had to leave, and no spare was there", now)


def _leaving(job: Job) -> list[NodeId]:
    return sorted(job.roster.leaving, key=node_order)
