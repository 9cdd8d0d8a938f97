"""What is done when slots that should hold the same state do not."""

from __future__ import annotations

from hotswap.core import messages as m
from hotswap.core.integrity import NEVER, TIMES_MAX
from hotswap.core.job import Job
from hotswap.core.transitions import TRAINS
from hotswap.core.types import NodeId, Role, Slot, Suspicion
from hotswap.errors import EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE

NOBODY_KNOWS = "with two that differ nobody can tell which one is right"
DURABLE = "durable checkpoints are made of compared states only"


def heed(job: Job, message: m.StateCompared, now: float) -> None:
    """Note that all agree; else go back to where they did, with the slots that differ taken from their peers.

    The agents of the odd slots end those workers by themselves, which is an ordinary loss, and all agents tell what is
    suspect with their answer to the fence. So nothing is forgotten if this coordinator ends now. What is left to decide
    here is whether a repair makes sense, and where.
    """
    if not (message.odd or message.undecided):
        job.record("state_compared", {"step": message.step})
        for node in job.roster:
            if job.role(node) is Role.SPARE:
                job.send(node, m.Agreed(generation=message.generation, step=message.step))
        return
    if job.phase not in TRAINS or not job.offenders.news(message):
        return
    job.suspicion = Suspicion(verified=message.verified, odd=message.odd)
    nodes = {slot: job.current.node_of(slot) for slot in (*message.odd, *message.undecided)}
    job.record(
        "state_differs",
        {
            "step": message.step,
            "verified": message.verified,
            "odd": [*message.odd],
            "undecided": [*message.undecided],
            "nodes": [*sorted(set(nodes.values()))],
            "detail": message.detail,
        },
    )
    what = f"{_named(nodes)} hold{'s' if len(nodes) == 1 else ''} another state than {'its' if len(nodes) == 1 else 'their'} peers at step {message.step}"
    if message.undecided:
        job.stop(
            EXIT_REQUEUE,
            f"{what}, and {NOBODY_KNOWS}; the last step at which all agreed is {message.verified}; {DURABLE}",
        )
    elif message.verified == NEVER:
        job.stop(EXIT_REQUEUE, f"{what}, and there is no step at which all agreed; {DURABLE}")
    elif job.offenders.again(message.odd, message.verified) >= TIMES_MAX:
        job.stop(
            EXIT_DO_NOT_REQUEUE,
            f"{what}, for the {TIMES_MAX}rd time since step {message.verified}: the program makes it differ",
        )
    else:
        _move_repeaters(job, nodes, what, now)


def _move_repeaters(job: Job, nodes: dict[Slot, NodeId], what: str, now: float) -> None:
    """A new process in the same place the first time; after that another node, if there are enough."""
    repeaters = job.offenders.blame(set(nodes.values()))
    if not repeaters or len(job.spares()) < len(repeaters):
        return
    for node in repeaters:
        job.evict(node, f"{what}, not for the first time on this node")
    job.recover(f"{', '.join(repeaters)} given up: {what}", now)


def _named(nodes: dict[Slot, NodeId]) -> str:
    return " and ".join(f"slot {slot} on {node}" for slot, node in sorted(nodes.items()))
