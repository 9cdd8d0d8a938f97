"""A job that waits: for a node in an empty place, for one that may only be cut off, or for one that may have what is missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotswap.core import ladder, resize, salvage
from hotswap.core.events import Disconnect
from hotswap.core.transitions import Phase
from hotswap.core.types import NodeId

if TYPE_CHECKING:
    from hotswap.core.job import Job


@dataclass(kw_only=True)
class Waiting:
    """``since``: when the wait for nodes began, if there is one; so many were ``missing`` then. ``taken_over_at``: this coordinator.

    ``cut_off``: members that fell silent in this recovery. They may only be cut off, and have what others need.
    """

    since: float | None = None
    missing: int = 0
    taken_over_at: float = float("-inf")
    cut_off: set[NodeId] = field(default_factory=set)


def for_nodes(job: Job, missing: int, now: float) -> None:
    """No spare is left. The wait begins anew when fewer nodes are missing than ever, not whenever something happens."""
    wait = job.wait
    if wait.since is None or missing < wait.missing:
        wait.since, wait.missing = now, missing
    job.enter(Phase.WAITING, now)
    job.record("waiting_for_node", {"missing": missing, "wait_s": job.limits.spare_wait_s})


def for_latecomers(job: Job, now: float) -> None:
    """No place is empty, but a node that is not here may have what is missing; if all are here, hardly any."""
    limits, all_here = job.limits, len(job.roster) >= job.limits.nodes_max
    wait_s = max(limits.detection_budget_s, 0.0 if all_here else limits.spare_wait_s)
    job.attempt.listens_until = job.wait.taken_over_at + wait_s
    job.enter(Phase.WAITING, now)
    job.record("waiting_for_node", {"missing": 1, "wait_s": wait_s})


def miss(job: Job, silent: Collection[NodeId]) -> None:
    """Members of which nothing is heard may only be cut off; what they hold is not lost yet."""
    job.out.extend(Disconnect(node=node, reason="silent") for node in silent)
    if job.started and job.membership is not None:
        job.wait.cut_off.update(node for node in silent if node in job.membership.places)


def ends(job: Job) -> float:
    """When a job that waits does so no longer.

    What can be saved only the answers to the fence tell. However short the wait is, they have as long as for any fence.
    """
    if job.attempt.listens_until is not None:
        return job.attempt.listens_until
    if job.rescue is not None:
        return job.rescue.until
    assert job.wait.since is not None, "waiting without a beginning"
    end = job.wait.since + job.limits.spare_wait_s
    if job.limits.checkpoints and job.awaited():
        end = max(end, job.attempt.phase_at + job.limits.phase_s)
    return end


def end(job: Job, now: float) -> None:
    """Nobody came. What only silent nodes have is lost then; that nodes are missing ends the job.

    This wait is over: should a node be lost from here on, the one for another begins then.
    """
    if all(node in job.roster for node in job.current.places):
        job.wait.cut_off.clear()
        job.wait.since = None
        job.recover("nodes that are needed did not come back", now)
        return
    reason = f"no spare and no new node within {job.limits.spare_wait_s:g} s"
    if not salvage.begin(job, reason, now) and not resize.shrink(job, reason, now):
        job.stop(ladder.FEWER.code, reason)
