"""What was killed, and what raised, is found out from real processes' evidence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import FSDP2, SCRIPTS, Cell, Job, Outcome, Runner, assert_clean, assert_identical

from hotswap.demo import strikes
from hotswap.session.faults import Fault

Start = Callable[[Cell], AbstractContextManager[Job]]
pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
FAILING = Cell(program=FSDP2, script=(str(HERE / "scripts" / "user_error.py"), str(SCRIPTS / FSDP2.script)))


def paced(pace_s: float) -> Cell:
    """As many steps as elsewhere, but so long that verdicts come while it trains."""
    script = (str(HERE / "scripts" / "paced.py"), str(pace_s), str(SCRIPTS / FSDP2.script))
    return Cell(program=FSDP2, script=script, deadline_s=110.0)


def test_a_dead_node_is_named(run: Runner, reference_of: Callable[[Cell], Outcome]) -> None:
    cell = Cell(program=FSDP2, faults=(Fault(step=3, moment="reduce", slot=2, scope="node"),))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    (found,) = outcome.named("diagnosed")
    assert (found["verdict"], found["culprit"]) == ("node_fault", {"kind": "node", "node": "node1"})
    assert (found["confident"], found["action"]) == (True, "replace_node")
    assert "verdict   node_fault" in outcome.console


def test_a_killed_worker_costs_no_node(run: Runner, reference_of: Callable[[Cell], Outcome]) -> None:
    cell = Cell(program=FSDP2, faults=(Fault(step=3, moment="backward", slot=1),))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    (found,) = outcome.named("diagnosed")
    # Nobody says who sent the signal.
    assert not found["confident"]
    assert (found["culprit"]["rank"], found["action"]) == (1, "respawn")


def test_a_node_with_a_broken_gpu_loses_its_place(
    start: Start, reference_of: Callable[[Cell], Outcome], tmp_path: Path
) -> None:
    """Its worker is started again there, for no recovery waits; then its kernel's log is read, and the spare takes the place."""
    cell = replace(paced(1.5), run_arguments=("--kernel-log", str(tmp_path / "{node}.log")))
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed")
        (tmp_path / "node1.log").write_text(
            "NVRM: Xid (PCI:0000:3d:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        )
        strikes.strike(job.logs, "abort-worker", slot=3)
        job.wait_for("recovery_done", cause="worker of slot 3 lost (killed by SIGABRT)")
        job.wait_for("advised", advice="exclude", host="node1")
        job.wait_for("spare_promoted", node="node2#1", replaces="node1#1")
        job.wait_for("node_turned_away", node="node1#1")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    (found,) = outcome.named("diagnosed")
    assert found["culprit"] == {"kind": "gpu", "node": "node1", "gpu": "0000:3d:00"}
    assert found["action"] == "replace_node"


@pytest.mark.full_matrix
def test_a_suspect_is_checked_and_a_spare_goes_before_it_the_next_time(
    start: Start, reference_of: Callable[[Cell], Outcome]
) -> None:
    """Killed twice, unproven: then the node's health is looked at, and the third time a spare takes its place."""
    cell = paced(3.0)
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed")
        for _ in range(2):
            strikes.strike(job.logs, "worker", slot=0)
            job.wait_for("diagnosed", verdict="process_fault")
        job.wait_for("advised", advice="avoid", host="node0")
        checked = job.wait_for("node_checked", node="node0#1")
        assert checked["failed"] == []
        strikes.strike(job.logs, "worker", slot=0)
        job.wait_for("spare_promoted", node="node2#1", replaces="node0#1")
        job.wait_for("diagnosed", verdict="process_fault")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert not outcome.named("node_turned_away"), "suspected, not proven: it stays as a spare"


def test_an_error_of_one_slots_code_is_the_codes(run: Runner) -> None:
    outcome = run(replace(FAILING, environment={"FAILING_RANKS": "1"}))
    assert outcome.exit_code == 1
    found = outcome.named("diagnosed")[-1]
    assert (found["verdict"], found["action"], found["confident"]) == ("user_error", "stop_with_report", True)
    assert found["culprit"]["rank"] == 1
    assert any("sample 3 has a tear in it" in line["text"] for line in found["deciding"])
    assert len(outcome.named("worker_lost")) == 2, "the message says that a third try is in vain"
    assert not outcome.named("spare_promoted"), "no node is to blame"


def test_an_error_on_all_slots_is_not_tried_again(run: Runner) -> None:
    outcome = run(replace(FAILING, environment={"FAILING_RANKS": "0,1,2,3"}))
    assert outcome.exit_code == 1
    assert len(outcome.named("recovery_started")) == 1, "the start"
    (stopped,) = outcome.named("job_stopped")
    assert "in the same way on all 4 slots: ValueError: sample 3 has a tear in it" in stopped["reason"]
