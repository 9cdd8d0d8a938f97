"""What is done when nobody advances: end who is waited for, elsewhere if it comes back, and stop if it does so everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap.core import messages as m
from hotswap.core.events import Fields, Scalar
from hotswap.core.job import Job
from hotswap.core.ladder import STANDSTILL
from hotswap.core.types import Slot


def look(job: Job, now: float) -> None:
    """If nobody has advanced for too long, end who is waited for; what the others do then is an ordinary recovery."""
    found = job.watch.look([slot for slot in job.current.slots if slot not in job.finished], now)
    if found is None:
        return
    reports = {slot: report for slot in found.culprits if (report := job.watch.at(slot)) is not None}
    places: dict[str, Scalar] = {str(slot): f"{report.phase}: {report.at}" for slot, report in reports.items()}
    fields: Fields = {"why": found.why, "culprits": [*found.culprits], "waiting": [*found.waiting], "at": places}
    if not found.culprits and not found.waiting:
        job.record("all_paused", {"why": found.why, "pause_limit_s": job.limits.pause_s})
        return
    job.record("hang_found", fields)
    job.watch.rest(now)
    step = max([job.committed or 0, *(report.step for report in reports.values())])
    times = max(job.watch.again(slot, step) for slot in found.culprits or (-1,))
    if not STANDSTILL.has_room(job.limits, times):
        job.stop(STANDSTILL.code, f"step {step} hangs for the {times}rd time in the same place: {found.why}")
    elif not found.culprits:
        job.recover(f"nobody advances: {found.why}", now, probe=True)
    else:
        _end(job, found.culprits, found.why, again=times > 1, now=now)


def _end(job: Job, slots: Sequence[Slot], why: str, *, again: bool, now: float) -> None:
    """The first time in a new process on the node; if that hangs too, on another node, if there is one."""
    nodes = sorted({job.current.node_of(slot) for slot in slots})
    if again and len(job.roster.usable(job.membership)) >= len(nodes):
        for node in nodes:
            job.evict(node, f"a worker hung there again: {why}")
        job.recover(f"{', '.join(nodes)} given up: {why}", now)
        return
    for slot in slots:
        message = m.EndHung(generation=job.current.generation, slot=slot, reason=why)
        job.send(job.current.node_of(slot), message)
