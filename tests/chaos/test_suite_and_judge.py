"""The matrix says what it tries, and calls each job what it was."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotswap.chaos import matrix, suite
from hotswap.chaos.matrix import Matrix, judge, judge_verdicts
from hotswap.demo.records import History
from hotswap.demo.runner import JobSpec
from hotswap.demo.verdict import Evidence
from hotswap.errors import UsageError

DONE = {
    "event": "recovery_done",
    "cause": "node1#1 lost",
    "phases_ms": {"total": 12.0},
    "redone_steps": 1,
    "generation": 2,
}
LOSS = {"event": "diagnosed", "verdict": "node_fault", "culprit": {"kind": "node", "node": "node0"}}
LOST = {"event": "node_lost", "node": "node1#1", "reason": "silent for 2 s"}
DEATH = {"kind": "node", "time": 1.0}


def evidence(
    code: int = 0, *, events: Any = (DONE,), deaths: int = 1, digest: str = "a", faults: tuple[str, ...] = ()
) -> Evidence:
    history = History(faults=faults)
    return Evidence(
        exit_code=code, history=history, final={0: {"model": digest}}, events=events, deaths=[DEATH] * deaths
    )


NETWORK = [name for name, drill in suite.DRILLS.items() if drill.needs]


def ordeal(drill: str) -> suite.Ordeal:
    made = suite.DRILLS[drill].make(suite.LAYOUTS["fsdp2-dp4"])
    assert made is not None
    return made


def test_the_full_suite_meets_every_layout_with_every_fault_that_makes_sense_there() -> None:
    cells = suite.cells("full")
    assert len(suite.DRILLS) >= 15 and len(suite.LAYOUTS) >= 4
    missing = {(drill, layout) for drill in suite.DRILLS for layout in suite.LAYOUTS} - {
        (cell.drill, cell.layout) for cell in cells
    }
    # Nothing is gathered in a step of DistributedDataParallel, and nothing is held twice where all is sharded.
    # With two nodes there is one other to keep replicas.
    of_two = {("two-nodes", layout) for layout, program in suite.LAYOUTS.items() if program.nodes == 2}
    gathers = {("worker-gather", "ddp-dp3"), ("node-gather", "ddp-dp3")}
    # Each host of its own imports the framework, and Megatron-Core is not small.
    apart = {(drill, layout) for drill in NETWORK for layout in suite.LAYOUTS if layout.startswith("megatron")}
    assert missing == {*gathers, ("flip-bit", "fsdp2-dp4"), *of_two, *apart}


def test_the_fast_suite_meets_every_layout() -> None:
    cells = suite.cells("fast")
    assert [cell.drill for cell in cells] == [*suite.FAST]
    assert {cell.layout for cell in cells} == {*suite.LAYOUTS}


@pytest.mark.parametrize("wrong", [{"layouts": ["tp9"]}, {"drills": ["meteor"]}])
def test_names_that_there_are_not_are_refused(wrong: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match=r"there is no (tp9|meteor); there are "):
        suite.cells("full", **wrong)


@pytest.mark.parametrize(
    ("drill", "found", "outcome"),
    [
        ("node-backward", evidence(), matrix.IDENTICAL),
        ("node-backward", evidence(digest="b"), matrix.DIFFERENT),
        ("node-backward", evidence(faults=("sample 7 was used twice",)), matrix.DIFFERENT),
        ("node-backward", evidence(75), matrix.WRONG),
        ("node-backward", evidence(deaths=0), matrix.MISSED),
        ("node-backward", evidence(events=()), matrix.MISSED),
        ("node-backward", evidence(events=({**DONE, "cause": "start"},)), matrix.MISSED),
        ("coordinator", evidence(events=()), matrix.IDENTICAL),
        ("coordinator", evidence(events=(LOST,)), matrix.NEEDLESS),
        ("short-cut", evidence(events=()), matrix.IDENTICAL),
        ("short-cut", evidence(events=(), deaths=0), matrix.MISSED),
        ("short-cut", evidence(events=(LOST, DONE)), matrix.NEEDLESS),
        ("slow-link", evidence(events=(DONE, {**LOST, "event": "worker_lost"})), matrix.NEEDLESS),
        ("cut-node", evidence(), matrix.IDENTICAL),
        ("cut-node", evidence(events=()), matrix.MISSED),
        ("no-spare", evidence(75, events=({"event": "job_stopped", "reason": "no spare"},)), matrix.STOPPED),
        ("no-spare", evidence(75, deaths=0), matrix.MISSED),
        ("no-spare", evidence(0), matrix.WRONG),
        ("raise-everywhere", evidence(1, deaths=4), matrix.STOPPED),
    ],
)
def test_what_a_job_is_called(drill: str, found: Evidence, outcome: str) -> None:
    assert judge(ordeal(drill), evidence(), found)[0] == outcome


def say(verdict: str, *, node: str = "", rank: int = -1) -> dict[str, Any]:
    named = {**({"node": node} if node else {}), **({"rank": rank} if rank >= 0 else {})}
    return {"event": "diagnosed", "verdict": verdict, "culprit": {"kind": "x", **named}}


@pytest.mark.parametrize(
    ("drill", "said", "wrong"),
    [
        ("node-backward", [say("node_fault", node="node0")], ""),
        ("node-backward", [], "did not say node_fault of node0"),
        ("node-backward", [say("unknown")], "said unknown instead of node_fault of node0"),
        ("worker-optimizer", [say("process_fault", node="node1", rank=3)], ""),
        ("worker-optimizer", [say("process_fault", node="node1", rank=2)], "said process_fault of slot 2 on node1"),
        ("worker-optimizer", [say("oom_host", node="node1", rank=3)], "said oom_host of slot 3 on node1"),
        ("raise", [say("user_error", rank=3)], ""),
        ("raise-everywhere", [say("user_error", node="node1")], ""),
        ("raise-everywhere", [say("node_fault", node="node1")], "said node_fault of node1"),
        ("coordinator", [], ""),
        ("coordinator", [say("node_fault", node="node1")], "said node_fault of node1 instead of nothing"),
        ("spare-then-node", [say("node_fault", node="node2"), say("node_fault", node="node0")], ""),
        ("spare-then-node", [say("node_fault", node="node2")], "did not say node_fault of node0"),
        ("node-then-survivor", [say("node_fault", node="node0")], ""),
        (
            "node-then-survivor",
            [say("node_fault", node="node0"), say("process_fault", node="node1", rank=2)],
            "",
        ),
        ("owner-and-holder", [say("node_fault", node="node1")], ""),
    ],
)
def test_what_the_job_said_of_its_faults_is_judged(drill: str, said: list[dict[str, Any]], wrong: str) -> None:
    found = judge_verdicts(ordeal(drill), said)
    assert found.startswith(wrong) if wrong else not found, found


def test_every_drill_says_which_verdicts_are_right() -> None:
    for cell in suite.cells("full"):
        nothing_broke = cell.drill in ("coordinator", "drain", "drain-no-spare", "short-cut", "slow-link")
        assert bool(cell.ordeal.truths) is not nothing_broke, cell.drill


class NoServers:
    """Nothing is started in these tests."""

    def of(self, framework: str) -> Any:
        return contextlib.nullcontext()


def test_a_job_that_does_not_end_is_called_hung_and_the_others_are_run(tmp_path: Path) -> None:
    def run(spec: JobSpec) -> int:
        spec.logs.mkdir(parents=True, exist_ok=True)
        if "stop-node" in spec.directory.name:
            raise TimeoutError("the job did not end")
        if not spec.faults:
            return 0
        spec.fault_log.write_text(json.dumps(DEATH) + "\n")
        events = (DONE, {"event": "job_stopped", "reason": "no spare"}, *said)
        (spec.logs / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return 75

    said = [LOSS]
    cells = suite.cells("full", ["fsdp2-dp4"], ["stop-node", "no-spare"])
    seen: list[str] = []
    runner = Matrix(tmp_path, NoServers(), keep=False, run=run)  # type: ignore[arg-type]
    outcomes = runner.measure(cells, lambda outcome: seen.append(outcome.outcome))
    assert [outcome.outcome for outcome in outcomes] == seen == [matrix.HUNG, matrix.STOPPED]
    assert (outcomes[1].recoveries, outcomes[1].recovery_ms, outcomes[1].redone) == (1, 12.0, 1)
    assert (tmp_path / "stop-node-on-fsdp2-dp4").exists(), "what went wrong is kept"
    assert not (tmp_path / "no-spare-on-fsdp2-dp4").exists()
    result = matrix.as_json(outcomes, {})
    assert (result["good"], result["bad"]) == (1, 1)
    assert (result["cells"][1]["verdict"], result["cells"][1]["right_verdict"]) == ("node_fault of node0", True)
    said[0] = {**LOSS, "culprit": {"kind": "node", "node": "node1"}}
    (wrong,) = runner.measure(cells[1:], lambda _: None)
    assert (wrong.outcome, wrong.good) == (matrix.WRONG_VERDICT, False)
    assert wrong.detail == "said node_fault of node1 instead of node_fault of node0"


def test_an_undisturbed_job_that_fails_ends_the_matrix(tmp_path: Path) -> None:
    def run(spec: JobSpec) -> int:
        spec.directory.mkdir(parents=True, exist_ok=True)
        return 1

    with pytest.raises(UsageError, match="the undisturbed job of fsdp2-dp4 ended with 1"):
        Matrix(tmp_path, NoServers(), keep=False, run=run).measure(  # type: ignore[arg-type]
            suite.cells("full", ["fsdp2-dp4"], ["hang"]), lambda _: None
        )


def test_every_job_gets_its_faults(tmp_path: Path) -> None:
    for cell in suite.cells("full"):
        spec = suite.job_of(cell, tmp_path, 10.0)
        assert spec.faults or spec.outside or cell.ordeal.cuts
        assert replace(spec, faults=(), outside=()).command() == spec.command(), "faults are no options of a job"
        assert ("--checkpoint-dir" in spec.command()) == cell.ordeal.checkpoints
