from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hotswap.demo import cli, report, verdict
from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.plan import Plan
from hotswap.demo.records import History, Recorder
from hotswap.demo.runner import JobSpec
from hotswap.demo.samples import planned_ids
from hotswap.demo.verdict import Evidence
from hotswap.errors import HotswapError, UsageError

TRAIN = TrainOptions(layout=Layout(dp=2), steps=4, eval_every=2)
PLAN = Plan(framework="fsdp2", train=TRAIN, nodes=2, kill="node", moment="reduce", slot=1, step=2)

DEATH: dict[str, Any] = {"time": 100.0, "kind": "node", "slot": 1, "moment": "reduce", "step": 2}
PHASES_MS = {"fence": 50.0, "plan": 1.0, "rebuild": 90.0, "restore": 20.0, "redo": 200.0, "total": 361.0}
START: list[dict[str, Any]] = [
    {"time": 90.0, "event": "recovery_started", "generation": 1, "cause": "start"},
    {"time": 90.1, "event": "recovery_planned", "generation": 1, "resume_step": 0},
    {
        "time": 91.0,
        "event": "recovery_done",
        "generation": 1,
        "resume_step": 0,
        "redone_steps": 0,
        "phases_ms": PHASES_MS,
    },
]
RECOVERY: list[dict[str, Any]] = [
    {"time": 100.02, "event": "recovery_started", "generation": 2, "cause": "node1 lost"},
    {"time": 100.08, "event": "recovery_planned", "generation": 2, "resume_step": 2},
    {
        "time": 100.4,
        "event": "recovery_done",
        "generation": 2,
        "resume_step": 2,
        "redone_steps": 1,
        "phases_ms": PHASES_MS,
    },
]


def history(steps: int = 4) -> History:
    return History(
        losses={step: {rank: float(5 - step + rank / 8).hex() for rank in range(2)} for step in range(steps)},
        held_out={0: {0: (5.5).hex(), 1: (5.25).hex()}},
    )


def evidence(**changes: Any) -> Evidence:
    base = Evidence(
        exit_code=0,
        history=history(),
        final={slot: {"model": f"m{slot}", "random": f"r{slot}"} for slot in range(2)},
        events=START,
        deaths=[],
    )
    return replace(base, **changes)


def swapped(**changes: Any) -> Evidence:
    return evidence(events=[*START, *RECOVERY], deaths=[DEATH], **changes)


def test_equal_evidence_is_identical() -> None:
    assert verdict.first_difference(evidence(), swapped()) is None
    assert evidence().final_sha256() == swapped().final_sha256()


@given(step=st.integers(0, 3), rank=st.integers(0, 1))
def test_the_last_bit_of_a_loss_counts(step: int, rank: int) -> None:
    changed = history()
    value = float.fromhex(changed.losses[step][rank])
    changed.losses[step][rank] = (value * (1 + 2**-52)).hex()
    difference = verdict.first_difference(evidence(), evidence(history=changed))
    assert difference is not None
    assert difference.startswith(f"loss of step {step}, data-parallel rank {rank}: ")


def test_the_first_of_several_differences_is_named() -> None:
    changed = history()
    changed.losses[3][0] = changed.losses[1][1] = (9.0).hex()
    difference = verdict.first_difference(evidence(), evidence(history=changed, final={}))
    assert difference == "loss of step 1, data-parallel rank 1: 9.0 instead of 4.125"


def test_a_missing_step_and_an_extra_step_are_differences() -> None:
    assert verdict.first_difference(evidence(), evidence(history=history(3))) is not None
    assert verdict.first_difference(evidence(history=history(3)), evidence()) is not None


def test_an_evaluation_loss_counts() -> None:
    changed = history()
    changed.held_out[0][1] = (1.0).hex()
    difference = verdict.first_difference(evidence(), evidence(history=changed))
    assert difference == "held-out loss of step 0, data-parallel rank 1: 1.0 instead of 5.25"


@pytest.mark.parametrize(
    ("final", "difference"),
    [
        ({0: {"model": "m0", "random": "r0"}}, "final state of slot 1: only one of the runs has it"),
        ({0: {"model": "m0", "random": "x"}, 1: {"model": "m1", "random": "r1"}}, "final state of slot 0: random"),
        ({0: {"model": "m0"}, 1: {"model": "m1", "random": "r1"}}, "final state of slot 0: random"),
    ],
)
def test_every_part_of_every_slots_state_counts(final: dict[int, dict[str, str]], difference: str) -> None:
    found = evidence(final=final)
    assert verdict.first_difference(evidence(), found) == difference
    assert verdict.first_difference(found, evidence()) == difference
    assert found.final_sha256() != evidence().final_sha256()


def test_a_recovery_is_timed_from_the_death_on() -> None:
    [item] = verdict.recoveries(swapped())
    assert (item.generation, item.resume_step, item.redone_steps) == (2, 2, 1)
    expected = {**PHASES_MS, "detect": 20.0, "total": 400.0}
    assert item.phases_ms == pytest.approx(expected)


def test_a_recovery_that_had_to_start_over_is_counted_to_its_end() -> None:
    again = [{**event, "generation": 3, "time": event["time"] + 1} for event in RECOVERY]
    [item] = verdict.recoveries(evidence(events=[*START, *RECOVERY[:2], *again], deaths=[DEATH]))
    assert item.generation == 3
    assert item.phases_ms["total"] == pytest.approx(1400.0)


def test_deaths_of_spares_and_coordinators_need_no_recovery() -> None:
    run = evidence(deaths=[{**DEATH, "kind": "coordinator"}, {**DEATH, "kind": "spare"}])
    assert verdict.recoveries(run) == []
    assert verdict.recovered(run)


def test_an_unanswered_death_is_no_recovery() -> None:
    assert verdict.recovered(swapped())
    assert not verdict.recovered(evidence(deaths=[DEATH]))
    assert not verdict.recovered(swapped(exit_code=1))


def test_judgement_of_a_good_demonstration() -> None:
    outcome = report.judge(PLAN, evidence(), swapped())
    assert (outcome.identical, outcome.complaint) == (True, None)


@pytest.mark.parametrize(
    ("reference", "run", "complaint"),
    [
        (evidence(), evidence(), "0 of 1 ordered deaths happened"),
        (evidence(), evidence(deaths=[DEATH]), "not every death was followed by a recovery"),
        (evidence(exit_code=3), swapped(), "the reference run did not end well"),
        (evidence(), swapped(exit_code=75), "the run ended with 75"),
        (
            evidence(history=history(3)),
            swapped(history=history(3)),
            "the reference run shows 3 of 4 steps and 2 of 2 slots",
        ),
        (evidence(final={}), swapped(final={}), "the reference run shows 4 of 4 steps and 0 of 2 slots"),
        (evidence(), swapped(history=replace(history(), faults=("slot 0 starved",))), "slot 0 starved"),
        (evidence(history=replace(history(), faults=("slot 1 starved",))), swapped(), "slot 1 starved"),
    ],
)
def test_what_makes_an_identical_result_worthless(reference: Evidence, run: Evidence, complaint: str) -> None:
    outcome = report.judge(PLAN, reference, run)
    assert (outcome.identical, outcome.complaint) == (True, complaint)


def test_the_json_report_has_what_is_promised() -> None:
    found = json.loads(json.dumps(report.as_json(report.judge(PLAN, evidence(), swapped()))))
    assert found["recovered"] is found["identical"] is found["samples_exactly_once"] is True
    assert (found["redone_steps"], found["generation"]) == (1, 2)
    assert list(found["phases_ms"]) == ["detect", "fence", "plan", "rebuild", "restore", "redo", "total"]
    assert found["final_state_sha256"] == found["reference_sha256"]
    assert found["losses"] == [5.0625, 4.0625, 3.0625, 2.0625]
    assert found["held_out_losses"] == {"0": 5.375}
    assert found["config"]["kill"] == "node"
    assert {"hotswap", "python", "torch"} <= set(found["versions"])


def test_without_a_recovery_there_are_no_phases() -> None:
    found = report.as_json(report.judge(replace(PLAN, kill="none"), evidence(), evidence()))
    assert (found["phases_ms"], found["redone_steps"], found["recoveries"]) == (None, 0, [])


def rendered(outcome: report.Outcome) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(report.for_people(outcome))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_people_read_a_table_a_chart_and_the_verdict() -> None:
    text = rendered(report.judge(PLAN, evidence(), swapped()))
    header, numbers = text.splitlines()[2:4]
    assert header.split() == [
        "generation",
        "detect",
        "fence",
        "plan",
        "rebuild",
        "restore",
        "redo",
        "total",
        "redone",
        "steps",
    ]
    assert numbers.split() == ["2", "20", "50", "1", "90", "20", "200", "400", "1"]
    assert text.count("●") == 4 + 1
    assert "verdict   identical" in text


def test_people_read_where_it_differs_and_why_it_does_not_count() -> None:
    changed = history()
    changed.losses[3][0] = (9.0).hex()
    text = rendered(report.judge(PLAN, evidence(), evidence(history=changed)))
    assert "verdict   different (first difference at loss of step 3, data-parallel rank 0: 9.0 instead of 2.0)" in text
    assert "but       0 of 1 ordered deaths happened" in text


# --- from files, and the exit status -------------------------------------------------------------------------------


class Slot:
    """Leaves what a worker leaves."""

    rehearsing = False
    generation = 1

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.step = 0

    def digests(self) -> dict[str, str]:
        return {"model": f"m{self.slot}"}

    def snapshot_nbytes(self) -> int:
        return 100


def leave(directory: Path, *, death: bool, loss: float = 3.0) -> None:
    """Files of a whole run of PLAN."""
    (directory / "job").mkdir(parents=True)
    for slot in (Slot(0), Slot(1)):
        recorder = Recorder(directory, slot, dp_rank=slot.slot)
        for slot.step in range(TRAIN.steps):
            slot.generation = 2 if death and slot.step >= 2 else 1
            recorder.attempt(planned_ids(TRAIN.batch(2), slot.step, slot.slot), loss=loss)
        recorder.final()
    events = [*START, *RECOVERY] if death else START
    (directory / "job" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if death:
        (directory / "faults.jsonl").write_text(json.dumps(DEATH) + "\n")


def test_evidence_is_read_from_files(tmp_path: Path) -> None:
    leave(tmp_path, death=True)
    found = verdict.gather(tmp_path, tmp_path / "job" / "events.jsonl", tmp_path / "faults.jsonl", TRAIN, 0)
    assert found.history.faults == ()
    assert found.history.mean_losses() == [3.0] * 4
    assert found.final == {0: {"model": "m0"}, 1: {"model": "m1"}}
    assert (found.generation, len(found.deaths)) == (2, 1)


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert verdict.read_lines(path) == [{"a": 1}, {"a": 2}]
    assert verdict.read_lines(tmp_path / "none") == []


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """Jobs that are run by leaving their files; their specifications."""
    run: list[JobSpec] = []

    def run_job(spec: JobSpec, notice: Any) -> int:
        run.append(spec)
        leave(spec.directory, death=bool(spec.faults))
        return 0

    monkeypatch.setattr(cli, "run_job", run_job)
    return run


ARGV = ["--framework", "fsdp2", "--layout", "dp2", "--steps", "4", "--step", "2", "--at", "reduce", "--victim", "1"]


def test_identical_is_success_and_says_so_in_json(
    jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ARGV, "--json", "--keep", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True
    assert [bool(job.faults) for job in jobs] == [False, True]


def test_different_is_failure(
    jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(spec: JobSpec, notice: Any) -> int:
        leave(spec.directory, death=bool(spec.faults), loss=4.0 if spec.faults else 3.0)
        return 0

    monkeypatch.setattr(cli, "run_job", run_job)
    assert cli.main([*ARGV, "--keep", str(tmp_path)]) == 1
    assert "different (first difference at loss of step 0" in " ".join(capsys.readouterr().out.split())


def test_a_kept_reference_is_used_again_and_runs_are_numbered(
    jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cli.main([*ARGV, "--json", "--keep", str(tmp_path)]) == 0
    assert [job.directory.name.split("-")[0] for job in jobs] == ["reference", "run", "run"]
    assert [job.directory.name for job in jobs[1:]] == ["run-1", "run-2"]


def test_another_seed_needs_another_reference(
    jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in ("1", "2"):
        assert cli.main([*ARGV, "--json", "--keep", str(tmp_path), "--seed", seed]) == 0
    assert len({job.directory for job in jobs if job.directory.name.startswith("reference")}) == 2


def test_without_keep_nothing_stays(
    jobs: list[JobSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    assert cli.main([*ARGV, "--json"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failed_job_says_whose_fault_it_was_and_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(spec: JobSpec, notice: Any) -> int:
        log = spec.logs / "node0" / "gen1" / "slot1.err"
        log.parent.mkdir(parents=True)
        log.write_text("Traceback (most recent call last):\nZeroDivisionError: division by zero\n")
        stop = {"time": 1.0, "event": "job_stopped", "generation": 1, "reason": "the worker of slot 1 failed"}
        (spec.logs / "events.jsonl").write_text(json.dumps(stop) + "\n")
        return 1

    monkeypatch.setattr(cli, "run_job", run_job)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(HotswapError, match=r"(?s)the worker of slot 1 failed.*slot1\.err.*ZeroDivisionError"):
        cli.main([*ARGV, "--json"])
    assert list(tmp_path.glob("hotswap-demo-*/reference-*/job/events.jsonl"))


def test_a_missing_megatron_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install megatron-core, or use --framework fsdp2"):
        cli.main([])


def test_interruption_is_130_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(spec: JobSpec, notice: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_job", run_job)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    assert cli.main(ARGV) == 130
    assert list(tmp_path.iterdir()) == []
