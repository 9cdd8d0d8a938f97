"""What is done about a verdict, what is remembered, and what must never happen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import Blames, Culprit, Diagnosis, Verdict
from hotswap.diagnosis.history import load, save
from hotswap.diagnosis.policy import LADDERS, NEVER_A_NODE, Action, History, PolicyConfig, decide, release
from hotswap.errors import UsageError

DAY = 24 * 3600.0


def a(
    verdict: Verdict,
    *,
    confidence: float = 0.9,
    node: str | None = "n1",
    kind: Blames = Blames.NODE,
    proven: bool = True,
) -> Diagnosis:
    return Diagnosis(
        verdict=verdict,
        confidence=confidence,
        culprit=Culprit(kind=kind, node=node),
        reason="",
        rules=("x",),
        deciding=(),
        echoes=(),
        proven=proven,
    )


def actions(diagnosis: Diagnosis, times: list[float], config: PolicyConfig | None = None) -> list[Action]:
    history, done = History(), []
    for now in times:
        decision = decide(diagnosis, history, now, config)
        history = decision.history
        done.append(decision.action)
    return done


def test_a_proven_node_is_replaced_and_kept_out() -> None:
    decision = decide(a(Verdict.NODE_FAULT), History(), 0.0)
    assert (decision.action, decision.node) == (Action.REPLACE, "n1")
    assert decision.history.is_quarantined("n1", DAY)
    assert not decision.history.is_quarantined("n1", 8 * DAY)
    assert not release(decision.history, "n1").is_quarantined("n1", 1.0)


def test_a_node_whose_fault_is_not_proven_is_kept_out_once_it_comes_back() -> None:
    first = decide(a(Verdict.NODE_FAULT, proven=False), History(), 0.0)
    assert (first.action, first.history.quarantined) == (Action.REPLACE, {})
    again = decide(a(Verdict.NODE_FAULT, proven=False), first.history, 60.0)
    assert again.history.is_quarantined("n1", DAY)


def test_a_suspected_node_is_checked_first_and_replaced_when_it_returns() -> None:
    assert actions(a(Verdict.NODE_FAULT, confidence=0.4), [0.0, 60.0]) == [Action.CHECK, Action.REPLACE]


def test_an_unknown_fault_is_checked_then_replaced_on_the_same_node() -> None:
    assert actions(a(Verdict.UNKNOWN, confidence=0.2), [0.0, 60.0]) == [Action.CHECK, Action.REPLACE]


def test_a_fault_without_a_node_replaces_nobody() -> None:
    assert set(actions(a(Verdict.NODE_FAULT, node=None), [0.0, 1.0, 2.0, 3.0])) == {Action.CHECK}


def test_old_faults_fade() -> None:
    soon = actions(a(Verdict.PROCESS_FAULT), [0.0, 60.0])
    late = actions(a(Verdict.PROCESS_FAULT), [0.0, 10 * DAY])
    assert (soon, late) == ([Action.RESPAWN, Action.CHECK], [Action.RESPAWN, Action.RESPAWN])


def test_user_errors_stop_at_once() -> None:
    assert actions(a(Verdict.USER_ERROR, kind=Blames.CODE), [0.0]) == [Action.STOP]


def test_a_clock_that_goes_back_adds_no_faults() -> None:
    history = decide(a(Verdict.PROCESS_FAULT), History(), 1000.0).history
    assert history.faults_of("n1", 0.0, PolicyConfig()) == 1.0


VERDICTS = st.sampled_from(list(Verdict))


@settings(deadline=None)
@given(
    st.lists(st.tuples(VERDICTS, st.sampled_from(list(Blames)), st.floats(0, 1), st.floats(0, 30 * DAY)), max_size=30)
)
def test_no_node_is_ever_replaced_for_what_is_not_its_fault(
    story: list[tuple[Verdict, Blames, float, float]],
) -> None:
    history = History()
    for verdict, kind, confidence, now in story:
        decision = decide(a(verdict, kind=kind, confidence=confidence), history, now)
        history = decision.history
        if verdict in NEVER_A_NODE:
            assert decision.action is not Action.REPLACE
        if decision.action is Action.REPLACE:
            assert decision.node is not None
            assert kind not in (Blames.CODE, Blames.NOBODY, Blames.STORAGE)


def test_every_verdict_has_a_ladder_and_only_node_verdicts_end_with_a_swap() -> None:
    assert set(LADDERS) == set(Verdict)
    for verdict in NEVER_A_NODE:
        assert Action.REPLACE not in LADDERS[verdict]


def test_memory_is_bounded() -> None:
    config = PolicyConfig(nodes_max=10, quarantined_max=3)
    history = History()
    for number in range(50):
        history = decide(a(Verdict.NODE_FAULT, node=f"n{number}"), history, float(number), config).history
    assert len(history.burdens) == 10
    assert set(history.quarantined) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("name", ["half_life_s", "nodes_max", "quarantine_s", "quarantined_max"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PolicyConfig(**{name: 0})


def test_the_history_survives_the_job(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert load(path) == History()
    history = decide(a(Verdict.NODE_FAULT), History(), 5.0).history
    save(history, path)
    assert load(path) == history
    assert [one.name for one in tmp_path.iterdir()] == ["nodes.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', '{"version": 1, "faults": [{}], "quarantined": {}}'])
def test_a_damaged_history_is_said(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="cannot read the history"):
        load(path)


def test_a_history_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(UsageError, match="no history of nodes"):
        load(path)


def test_a_history_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(UsageError, match="cannot write"):
        save(History(), path)
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    save(decide(a(Verdict.NODE_FAULT), History(), 5.0).history, tmp_path / "n")
    data = json.loads((tmp_path / "n").read_text(encoding="utf-8"))
    assert data["faults"] == [{"node": "n1", "verdict": "node_fault", "faults": 1.0, "time": 5.0}]
