"""What is done about a worker that is slow: it is told, and its node given up only where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from hotswap.core.job import Job
from hotswap.core.progress import Progress
from hotswap.core.tempo import Slow
from hotswap.core.types import Slot


def heed(job: Job, reports: Mapping[Slot, Progress], now: float) -> None:
    """Tell who is slow; give its node up only if that was asked for, and there is a spare."""
    job.slow.saw(job.current.generation, reports)
    roles = {
        slot: built.role
        for member in job.current.places
        if member in job.roster
        for slot, built in job.roster[member].built.items()
        if slot in job.current.slots_of(member)
    }
    slow = job.slow.look(roles)
    for slot in job.slow.news(sorted(slow)):
        one = slow[slot]
        job.record(
            "slow_worker",
            {
                "slot": slot,
                "node": job.current.node_of(slot),
                "part": one.part,
                "ms": round(1000 * one.own_s, 3),
                "peers_ms": round(1000 * one.peers_s, 3),
                "ratio": round(one.ratio, 2),
            },
        )
    limit = job.limits.evict_slow
    worst = max(slow.values(), key=lambda one: one.ratio, default=None)
    if worst is not None and limit and worst.ratio >= limit:
        _give_up(job, worst, now)


def _give_up(job: Job, slow: Slow, now: float) -> None:
    """A spare that is built for the place takes it, if there is one; any other one builds first, which costs once."""
    if not job.spares():
        return
    victim = job.current.node_of(slow.slot)
    reason = f"slot {slow.slot} takes {slow.ratio:.1f} times as long as its peers in '{slow.part}'"
    job.evict(victim, reason)
    job.recover(f"{victim} given up: {reason}", now)
