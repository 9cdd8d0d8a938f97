"""The story of a job from its event log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotswap.errors import UsageError
from hotswap.observability.report import as_text, main, read_events, report_of

DIAGNOSED = {
    "event": "diagnosed",
    "generation": 3,
    "verdict": "node_fault",
    "confidence": 0.9,
    "confident": True,
    "culprit": {"kind": "node", "node": "b#1"},
    "action": "replace_node",
    "action_reason": "it is gone",
    "reason": "the node fell silent",
    "rules": ["job.node-silent"],
    "deciding": [{"text": "b#1 fell silent", "count": 1, "kind": "silent"}],
    "echoes": [],
}


def story() -> list[dict[str, Any]]:
    """Two nodes are lost, the second before the first was answered; then a worker, which ends the job."""
    return [
        {"event": "recovery_started", "generation": 1, "cause": "start"},
        {"event": "recovery_done", "generation": 1, "redone_steps": 0, "phases_ms": {"total": 900.0}},
        {"event": "step_committed", "generation": 1, "step": 7},
        {"event": "node_lost", "generation": 1, "node": "d#1", "role": "spare", "reason": "silent"},
        {"event": "node_lost", "generation": 1, "node": "b#1", "role": "active", "reason": "silent for 5 s"},
        {"event": "spare_promoted", "generation": 2, "node": "c#1", "replaces": "b#1"},
        {"event": "recovery_started", "generation": 2, "cause": "b#1 lost"},
        {"event": "node_lost", "generation": 2, "node": "c#1", "role": "active", "reason": "connection closed"},
        {"event": "recovery_started", "generation": 3, "cause": "c#1 lost"},
        {"event": "recovery_planned", "generation": 3, "resume_step": 7},
        {
            "event": "recovery_done",
            "generation": 3,
            "redone_steps": 1,
            "phases_ms": {"fence": 50.0, "rebuild": 90.5, "total": 300.0},
        },
        DIAGNOSED,
        {"event": "step_committed", "generation": 3, "step": 9},
        {"event": "worker_lost", "generation": 3, "slot": 0, "node": "a#1", "status": 1, "detail": "KeyError: 'lr'"},
        {"event": "job_stopped", "generation": 3, "exit_code": 1, "reason": "the script failed"},
        {**DIAGNOSED, "verdict": "user_error", "generation": 3},
    ]


def test_a_hang_is_told_with_the_place_where_it_was() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "threading.py", line 324 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "train.py", line 9 in load\n'
        '  File "train.py", line 20 in main\n  File "a.py", line 1 in a\n  File "b.py", line 1 in b\n'
    )
    events = [
        {"event": "all_paused", "generation": 1, "why": "all workers are busy outside of collectives"},
        {"event": "hang_found", "generation": 1, "why": "slot 1 has not entered operation 4 of dp", "culprits": [1]},
        {"event": "worker_stacks", "generation": 1, "slot": 1, "node": "a#1", "stacks": stacks},
        {"event": "worker_lost", "generation": 1, "slot": 1, "node": "a#1", "status": -9, "detail": "hung: slot 1"},
        {"event": "recovery_started", "generation": 2, "cause": "worker of slot 1 lost"},
    ]
    report = report_of(events)
    assert report.pauses == 1
    (recovery,) = report.recoveries
    assert recovery.hangs == ["slot 1 has not entered operation 4 of dp"] and recovery.stacks == {"1": stacks}
    text = as_text(report)
    assert "  hung      slot 1 has not entered operation 4 of dp\n" in text
    assert '  slot 1    File "train.py", line 9 in load\n' in text and "threading.py" not in text and "b.py" not in text
    assert "1 recovery, 1 pause in which nobody advanced" in text


def test_verdicts_on_spares_and_checks_stand_by_themselves() -> None:
    said = {
        "event": "diagnosed",
        "generation": 1,
        "verdict": "node_fault",
        "confident": True,
        "culprit": {"kind": "node", "node": "c"},
        "reason": "it fell silent",
        "action": "replace_node",
        "action_reason": "seen before",
        "rules": ["job.node-silent"],
        "deciding": [],
    }
    away = {"event": "node_turned_away", "generation": 1, "node": "c#2", "reason": "c#2 takes no further part: a clock"}
    report = report_of([{**said, "of": "spare"}, {**said, "of": "check"}, away])
    assert not report.recoveries and not report.diagnosis
    assert [other["of"] for other in report.others] == ["spare", "check"]
    text = as_text(report)
    assert "spare\n  verdict   node_fault: it fell silent\n" in text
    assert "turned away c#2 takes no further part: a clock\n" in text


def test_losses_that_are_answered_together_are_one_recovery() -> None:
    report = report_of(story())
    first, last = report.recoveries
    assert (first.generation, first.cause, first.resume_step, first.redone_steps) == (3, "c#1 lost", 7, 1)
    assert first.lost == ["node b#1: silent for 5 s", "node c#1: connection closed"]
    assert first.spares == ["c#1 for b#1"]
    assert first.diagnosis["verdict"] == "node_fault"
    assert last.lost == ["worker of slot 0 on a#1: KeyError: 'lr'"]
    assert last.diagnosis["verdict"] == "user_error"
    assert (report.committed_step, report.generation, report.exit_code) == (9, 3, 1)


def test_the_text_says_what_was_lost_why_and_what_it_cost() -> None:
    text = as_text(report_of(story()))
    for part in (
        "generation 3  c#1 lost",
        "resumed   at step 7, 1 steps redone; ms: fence 50, rebuild 90, total 300",
        "verdict   node_fault: the node fell silent",
        "culprit   node b#1",
        "advice    replace node: it is gone",
        "because   b#1 fell silent",
        "2 recoveries, generation 3, step 9 committed; exit 1: the script failed",
    ):
        assert part in text, text


def test_a_calm_job_and_one_that_still_runs() -> None:
    calm = report_of([{"event": "job_stopped", "generation": 1, "exit_code": 0, "reason": "every worker finished"}])
    assert as_text(calm) == "0 recoveries, generation 1, no step committed; exit 0: every worker finished"
    assert "has not said how it ended" in as_text(report_of([]))


def test_the_command_reads_a_log_directory_and_passes_over_a_line_that_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    lines = "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in story())
    (tmp_path / "job" / "events.jsonl").write_text(lines + '{"time": 2.0, "eve')
    assert main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [recovery["generation"] for recovery in found["recoveries"]] == [3, 3]
    assert main([str(tmp_path / "job" / "events.jsonl")]) == 0
    assert "2 recoveries" in capsys.readouterr().out


def test_what_is_no_log_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"name the log directory of one job.*0 found"):
        list(read_events(tmp_path))
    with pytest.raises(UsageError, match="name the log directory"):
        list(read_events(tmp_path / "missing"))


def test_who_was_slow_and_who_differed() -> None:
    slow = {
        "event": "slow_worker",
        "generation": 1,
        "slot": 3,
        "node": "b#1",
        "part": "update",
        "ms": 51.4,
        "peers_ms": 20.2,
        "ratio": 2.54,
    }
    differs = {
        "event": "state_differs",
        "generation": 1,
        "step": 7,
        "verified": 5,
        "odd": [2],
        "undecided": [],
        "nodes": ["c#1"],
        "detail": "model/weight",
    }
    report = report_of([slow, differs, {"event": "job_stopped", "exit_code": 93, "reason": "differs again"}])
    text = as_text(report)
    assert "slow  slot 3 on b#1 (generation 1): 51 ms in 'update' where its peers take 20 ms" in text
    assert "  differs   slot 2 at step 7 in model/weight; all agreed at step 5" in text
    assert report.as_json()["recoveries"][0]["differing"]
    undecided = {**differs, "odd": [], "undecided": [0, 1], "detail": ""}
    assert report_of([undecided]).recoveries[0].differing == ["slot 0, 1 at step 7; all agreed at step 5"]


def test_drills_are_told_apart_from_what_just_happened() -> None:
    ordered = {"event": "drill", "generation": 1, "reason": "hotswap inject by ann"}
    events = [
        {**ordered, "fault": "worker", "slot": 3, "node": "b#1"},
        {**ordered, "fault": "coordinator", "slot": -1, "node": ""},
        {**DIAGNOSED, "drill": True},
    ]
    text = as_text(report_of(events))
    assert "drill  worker: slot 3 on b#1 (generation 1), hotswap inject by ann" in text
    assert "drill  coordinator: the coordinator (generation 1), hotswap inject by ann" in text
    assert "(a drill): " in text
