"""From a verdict and what the policy makes of it to what the coordinator's state machine is told."""

from __future__ import annotations

from hotswap.core.events import Advice, Judged
from hotswap.diagnosis import Diagnosis
from hotswap.diagnosis.policy import Action, Decision


def advice_of(answer: Diagnosis, decision: Decision) -> list[Judged]:
    """What is to be done from now on; nothing where going on as usual is right.

    A node is only ever excluded if its hardware, its kernel or a health check says that it is broken. One that is merely suspected
    may go on until it loses a worker again; if a spare is ready then, that goes first.
    """
    said = f"{answer.verdict.value}: {answer.reason}"
    if decision.action is Action.REPLACE and decision.node:
        broken = answer.proven and answer.confident
        return [Judged(advice=Advice.EXCLUDE if broken else Advice.AVOID, host=decision.node, reason=said)]
    if decision.action is Action.CHECK:
        # An error of the program is no reason to keep off the node that it happened on, but a good one to look at it.
        host = decision.node or answer.culprit.node
        check = [Judged(advice=Advice.CHECK, host=host, reason=said)] if host else []
        return check + ([Judged(advice=Advice.AVOID, host=decision.node, reason=said)] if decision.node else [])
    return []


def first_advice(answer: Diagnosis, decision: Decision) -> list[Judged]:
    """From an error message alone, while the recovery from it is under way: what must not be tried twice."""
    rank, said = answer.culprit.rank, f"{answer.verdict.value}: {answer.reason}"
    if decision.action is Action.STOP and answer.confident and rank is not None:
        return [Judged(advice=Advice.GIVE_UP, slot=rank, reason=said)]
    return [one for one in advice_of(answer, decision) if one.advice is Advice.EXCLUDE]
