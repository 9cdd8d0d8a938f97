"""What is done about a worker that is lost or in trouble, or whose script has failed: its node is there, and may go on."""

from __future__ import annotations

from hotswap.core import messages as m
from hotswap.core.job import Job
from hotswap.core.ladder import RESPAWN
from hotswap.core.transitions import Phase
from hotswap.core.types import NodeId, Slot
from hotswap.errors import EXIT_USER_ERROR


def on_lost(job: Job, node: NodeId, message: m.WorkerLost, now: float) -> None:
    """A process has ended that should not have: a new one, another node, or the end."""
    slot = message.slot
    job.roster[node].built.pop(slot, None)
    if slot not in job.current.slots_of(node) or slot in job.finished:
        return
    job.record("worker_lost", {"slot": slot, "node": node, "status": message.status, "detail": message.detail})
    if job.phase is Phase.RECOLLECTING:
        job.roster[node].lost.add(slot)
    elif not job.started and message.status > 0:
        job.stop(EXIT_USER_ERROR, f"the worker of slot {slot} failed before the first step: {message.detail}")
    elif not job.protected:
        job.stop(128 - message.status, f"the worker of slot {slot} was lost before hotswap.init(): {message.detail}")
    elif message.status > 0 and job.respawns.get(slot) and slot in job.counsel.hopeless:
        job.stop(EXIT_USER_ERROR, f"slot {slot} fails again: {message.detail} ({job.counsel.hopeless[slot]})")
    elif may_respawn(job, slot):
        job.recover(f"worker of slot {slot} lost ({message.detail})", now, {slot})
    elif message.status < 0 and job.roster.usable(job.membership):
        job.respawns.clear()
        reason = f"worker of slot {slot} lost {job.limits.respawns_max + 1} times without progress"
        job.evict(node, reason)
        job.recover(f"{node} given up: {reason}", now)
    else:
        code = EXIT_USER_ERROR if message.status > 0 else 128 - message.status
        job.stop(code, f"the worker of slot {slot} failed again and again without progress: {message.detail}")


def may_respawn(job: Job, slot: Slot) -> bool:
    """Count one more new process for *slot*, and say whether it may have it."""
    job.respawns[slot] = job.respawns.get(slot, 0) + 1
    return RESPAWN.has_room(job.limits, job.respawns[slot])


def on_trouble(job: Job, node: NodeId, message: m.WorkerTrouble, now: float) -> None:
    """A loss usually explains it within a moment; if none does, the groups are formed anew."""
    if job.trouble is None and job.phase not in (Phase.FENCING, Phase.WAITING):
        job.record("worker_trouble", {"slot": message.slot, "node": node, "detail": message.detail})
        cause = f"a collective failed on slot {message.slot}: {message.detail}"
        job.trouble = (now + job.limits.trouble_grace_s, cause)


def on_raised(job: Job, node: NodeId, message: m.WorkerRaised) -> None:
    """What fails on all slots in the same way fails for ever: no machine is to blame, and nothing is tried again."""
    job.record("script_raised", {"slot": message.slot, "node": node, "error": message.error})
    job.raised[message.slot] = message.error
    slots = job.current.slots
    kinds = {error.partition(":")[0] for error in job.raised.values()}
    if len(slots) > 1 and len(job.raised) == len(slots) and len(kinds) == 1:
        job.stop(EXIT_USER_ERROR, f"the script failed in the same way on all {len(slots)} slots: {message.error}")
