"""Going on with fewer nodes when none comes, and with more again when they do.

Another number of slots is another program: every process is started anew, with another ``WORLD_SIZE``, and reads the newest durable
checkpoint, whose tensors know their place in the whole. What lies in memory is of slots that are no more, and is dropped. Only
numbers of nodes that divide the number the job was started with come into question, so that the global batch stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.core import messages as m
from hotswap.core.events import Scalar
from hotswap.core.recovery import Halt
from hotswap.core.shards import Shards
from hotswap.core.types import Membership, NodeId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotswap.core.job import Job
    from hotswap.core.limits import Limits


def sizes(limits: Limits) -> tuple[int, ...]:
    """The numbers of nodes that the job may train with, the largest first."""
    least = limits.nodes_min or limits.nodes_active
    return tuple(n for n in range(limits.nodes_active, least - 1, -1) if limits.nodes_active % n == 0)


def shrink(job: Job, reason: str, now: float) -> bool:
    """Whether the job goes on with the nodes that are left, from the newest durable checkpoint."""
    nodes = _available(job)
    size = _largest(job.limits, len(nodes))
    if size is None or size >= len(job.current.places) or not _has_checkpoint(job):
        return False
    _resize(job, nodes[:size], reason, now)
    return True


def look(job: Job, now: float) -> None:
    """While training: let all halt at a boundary and make it durable as soon as there are nodes for a larger job."""
    if job.halt is None and not job.roster.leaving and now >= job.grow_from and _can_grow(job):
        job.halt = Halt(durable=True, grows=True)
        job.record("halt_asked", {"nodes": [*job.spares()], "durable": True, "grows": True})
        for node in job.current.places:
            job.send(node, m.Halt(generation=job.current.generation, durable=True))


def grow_if_durable(job: Job, now: float) -> None:
    """The boundary at which all have halted may be on storage now: go on from there with more nodes."""
    assert job.halt is not None, "growing begins with a halt"
    step = job.halt.step
    if job.durable_step != step:
        return
    nodes = _available(job)
    size = _largest(job.limits, len(nodes))
    went_on = job.committed is not None and job.committed > step
    if size is None or size <= len(job.current.places) or went_on:
        job.halt = None  # Who had come has left again, or it took so long that the members have gone on.
        return
    _resize(job, nodes[:size], "nodes have come", now)


def deadline(job: Job) -> float:
    """When ``on_tick`` has something to do, at the latest."""
    if job.halt is None or not job.halt.grows or job.halt.first_at is None:
        return float("inf")
    return job.halt.first_at + job.limits.phase_s


def on_tick(job: Job, now: float) -> None:
    """While training: the boundary did not get to storage, so the job stays as it is for a while."""
    if job.halt is not None and now >= deadline(job):
        job.record("resize_failed", {"step": job.halt.step, "reason": "the state at the boundary is not on storage"})
        job.halt, job.grow_from = None, now + job.limits.phase_s


def _largest(limits: Limits, nodes: int) -> int | None:
    return next((size for size in sizes(limits) if size <= nodes), None) if limits.nodes_min else None


def _available(job: Job) -> list[NodeId]:
    """Nodes that may have a place: members first, in their order, so that positions change for as few as possible."""
    members = [
        node
        for node in job.current.places
        if node in job.roster and node not in job.roster.leaving and not job.counsel.excludes(node)
    ]
    return members + job.roster.usable(job.membership)


def _can_grow(job: Job) -> bool:
    places = len(job.current.places)
    if places == job.limits.nodes_active:
        return False
    size = _largest(job.limits, len(_available(job)))
    return size is not None and size > places


def _has_checkpoint(job: Job) -> bool:
    return not job.started or job.durable_step >= 0 or job.attempt.checkpoint_step() is not None


def _resize(job: Job, places: Sequence[NodeId], reason: str, now: float) -> None:
    """The next generation has other slots: nothing that is known of the present ones is about them."""
    before = job.current
    job.leave(now)
    job.size_since = job.generations.next()
    job.membership = Membership(generation=job.size_since, places=tuple(places), width=before.width)
    nodes: list[Scalar] = [*places]
    job.record("job_resized", {"before": len(before.places), "now": len(places), "places": nodes, "reason": reason})
    job.roster.resize()
    job.shards = Shards()
    job.plan = job.wait.since = None
    for known in (job.peers, job.acked, job.respawns, job.failures, job.wait.cut_off):
        known.clear()
    job.fence(frozenset(job.membership.slots), f"{len(places)} nodes instead of {len(before.places)}: {reason}", now)
