"""What a verdict makes the coordinator do, and what it never makes it do."""

from __future__ import annotations

import pytest

from hotswap.core.events import Advice
from hotswap.diagnosis import Blames, Culprit, Diagnosis, Verdict
from hotswap.diagnosis.policy import History, decide
from hotswap.node.advice import advice_of, first_advice


def found(
    verdict: Verdict,
    *,
    confidence: float = 0.9,
    proven: bool = False,
    kind: Blames = Blames.NODE,
    rank: int | None = None,
) -> Diagnosis:
    return Diagnosis(
        verdict=verdict,
        confidence=confidence,
        culprit=Culprit(kind=kind, node="n1", rank=rank),
        reason="so it is",
        rules=("x",),
        deciding=(),
        echoes=(),
        proven=proven,
    )


def advised(one: Diagnosis, times: int = 1) -> list[tuple[Advice, str]]:
    """At the last of so many equal verdicts."""
    history = History()
    for _ in range(times):
        decision = decide(one, history, 1000.0)
        history = decision.history
    return [(judged.advice, judged.host) for judged in advice_of(one, decision)]


@pytest.mark.parametrize(
    ("diagnosis", "times", "advice"),
    [
        (found(Verdict.NODE_FAULT, proven=True, kind=Blames.GPU), 1, [(Advice.EXCLUDE, "n1")]),
        (found(Verdict.NODE_FAULT, proven=True, confidence=0.5), 1, [(Advice.CHECK, "n1"), (Advice.AVOID, "n1")]),
        (found(Verdict.NODE_FAULT), 1, [(Advice.AVOID, "n1")]),
        (found(Verdict.UNKNOWN, confidence=0.2), 1, [(Advice.CHECK, "n1"), (Advice.AVOID, "n1")]),
        (found(Verdict.UNKNOWN, confidence=0.2), 2, [(Advice.AVOID, "n1")]),
        (found(Verdict.PROCESS_FAULT, kind=Blames.RANK), 1, []),
        (found(Verdict.PROCESS_FAULT, kind=Blames.RANK), 2, [(Advice.CHECK, "n1"), (Advice.AVOID, "n1")]),
        (found(Verdict.TRANSIENT, kind=Blames.LINK), 1, []),
        (found(Verdict.USER_ERROR, kind=Blames.CODE), 1, []),
        (found(Verdict.USER_ERROR, kind=Blames.CODE), 9, []),
        (found(Verdict.USER_ERROR, kind=Blames.CODE, confidence=0.5), 1, [(Advice.CHECK, "n1")]),
        (found(Verdict.OOM_GPU, kind=Blames.GPU), 9, []),
        (found(Verdict.PREEMPTION, kind=Blames.NOBODY), 9, []),
    ],
)
def test_advice(diagnosis: Diagnosis, times: int, advice: list[tuple[Advice, str]]) -> None:
    assert advised(diagnosis, times) == advice


def at_once(one: Diagnosis) -> list[tuple[Advice, str, int]]:
    decision = decide(one, History(), 1000.0)
    return [(judged.advice, judged.host, judged.slot) for judged in first_advice(one, decision)]


def test_an_error_message_alone_ends_retries_or_a_nodes_part_and_nothing_else() -> None:
    of_code = found(Verdict.USER_ERROR, kind=Blames.CODE, rank=3)
    assert at_once(of_code) == [(Advice.GIVE_UP, "", 3)]
    assert at_once(found(Verdict.USER_ERROR, kind=Blames.CODE, rank=3, confidence=0.5)) == []
    assert at_once(found(Verdict.USER_ERROR, kind=Blames.CODE)) == []
    assert at_once(found(Verdict.OOM_GPU, kind=Blames.GPU, rank=3)) == [(Advice.GIVE_UP, "", 3)]
    assert at_once(found(Verdict.NODE_FAULT, proven=True, kind=Blames.GPU, rank=3)) == [(Advice.EXCLUDE, "n1", -1)]
    assert at_once(found(Verdict.NODE_FAULT, rank=3)) == []
