"""The tests of this folder bite: with its mechanism broken, a cell that is identical otherwise is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import FSDP2, SCRIPTS, Cell, Job, Outcome, Runner, assert_identical, assert_recovered

from hotswap.errors import EXIT_REQUEUE
from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
NODE = (Fault(step=3, moment="backward", slot=0, scope="node"),)
WORKER_IN_UPDATE = (Fault(step=3, moment="optimizer", slot=0),)
THEN_THE_OTHER = (*NODE, Fault(step=3, moment="backward", slot=2, scope="node", generation=2))
Start = Callable[[Cell], AbstractContextManager[Job]]
Reference = Callable[[Cell], Outcome]


def in_workers(cell: Cell, name: str) -> Cell:
    script = (str(HERE / "scripts" / "sabotaged.py"), name, str(SCRIPTS / cell.program.script))
    return replace(cell, script=script)


def in_agents(cell: Cell, name: str) -> Cell:
    path = os.pathsep.join(filter(None, (str(HERE / "sabotage"), os.environ.get("PYTHONPATH"))))
    environment = {**cell.environment, "PYTHONPATH": path, "HOTSWAP_E2E_BREAK_AGENTS": name}
    return replace(cell, environment=environment)


def test_a_worker_whose_snapshots_die_with_it_is_restored_from_elsewhere(run: Runner) -> None:
    outcome = run(in_agents(Cell(program=FSDP2, faults=WORKER_IN_UPDATE), "own_snapshots"))
    planned = outcome.named("recovery_planned")
    assert len(planned) == 1 or planned[-1]["sources"]["0"] != "own", outcome.story


def test_a_checkpoint_without_its_manifest_is_none(start: Start, tmp_path: Path) -> None:
    durable = ("--checkpoint-dir", str(tmp_path / "durable"), "--checkpoint-interval", "5")
    cell = in_agents(Cell(program=FSDP2, spares=2, steps=60, run_arguments=durable), "manifest")
    with start(cell) as job:
        job.wait_for("step_committed", step=12)
        job.kill_node("node0")
        job.kill_node("node1")
        outcome = job.finish()
    assert outcome.exit_code == EXIT_REQUEUE, outcome.story


def test_what_agents_do_not_tell_a_new_coordinator_the_event_log_does(start: Start, reference_of: Reference) -> None:
    # Nobody depends on one of them alone: tests/core has the same with the agents' words and without the log.
    cell = Cell(program=FSDP2, steps=60)
    with start(in_agents(cell, "memory_of_the_job")) as job:
        job.wait_for("step_committed", step=10)
        job.kill_coordinator()
        outcome = job.finish()
    assert outcome.named("coordinator_took_over")
    assert_identical(outcome, reference_of(cell))


def test_agents_that_cannot_be_alone_cost_the_job(start: Start) -> None:
    with start(in_agents(Cell(program=FSDP2, steps=60), "alone")) as job:
        job.wait_for("step_committed", step=10)
        job.kill_coordinator()
        outcome = job.finish()
    assert outcome.exit_code != 0, outcome.story


@pytest.mark.parametrize(
    ("name", "faults", "differing"),
    [("random_states", NODE, "random"), ("undo", WORKER_IN_UPDATE, "model"), ("one_bit", NODE, "model")],
)
def test_wrong_state_is_seen(
    name: str, faults: tuple[Fault, ...], differing: str, run: Runner, reference_of: Reference
) -> None:
    cell = Cell(program=FSDP2, faults=faults)
    outcome = run(in_workers(cell, name))
    # It goes through all the motions ...
    assert outcome.exit_code == 0, outcome.story
    assert_recovered(outcome)
    # ... and computes something else.
    with pytest.raises(AssertionError):
        assert_identical(outcome, reference_of(cell))
    final = reference_of(cell).final
    assert any(outcome.final[slot][differing] != final[slot][differing] for slot in final)


def test_a_forgotten_replication_loses_the_job(run: Runner) -> None:
    outcome = run(in_agents(Cell(program=FSDP2, spares=2, faults=THEN_THE_OTHER), "replication_again"))
    assert outcome.exit_code == EXIT_REQUEUE, outcome.story


def test_what_a_failed_attempt_left_is_in_the_way(run: Runner, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, faults=NODE)
    outcome = run(in_workers(cell, "reset"))
    with pytest.raises(AssertionError):
        assert_identical(outcome, reference_of(cell))
        assert_recovered(outcome)


@pytest.mark.full_matrix
def test_a_survivor_that_nobody_frees_has_to_be_ended(start: Start) -> None:
    # Among dead peers a closed connection wakes one after the other; nothing comes from a node that is only silent.
    cell = Cell(program=FSDP2, steps=60, run_arguments=("--detection-budget-s", "4"))
    with start(in_workers(cell, "abort")) as job:
        job.wait_for("step_committed", step=10)
        os.killpg(job.pids()["agents"]["node1"], signal.SIGSTOP)
        lost = job.wait_for("worker_lost")
        job.kill_node("node1")
        job.finish()
    assert lost["node"] == "node0#1"
    assert "did not leave the old generation" in lost["detail"]


def test_a_slow_link_costs_time_and_nothing_else(run: Runner, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, faults=NODE)
    outcome = run(in_agents(cell, "slow_link"))
    assert_recovered(outcome)
    assert_identical(outcome, reference_of(cell))


def test_snapshots_are_further_apart_where_replicas_are_slow(run: Runner, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=60, faults=(replace(NODE[0], step=50),), run_arguments=("--overhead-limit", "0.1"))
    outcome = run(in_agents(cell, "slow_link"))
    assert_identical(outcome, reference_of(cell))
    intervals = [event["interval"] for event in outcome.named("snapshot_interval")]
    assert intervals and max(intervals) > 1, outcome.story
    # The replica under way when a node is lost does not count, and neither does the step that was cut short.
    assert outcome.named("recovery_done")[-1]["redone_steps"] <= 2 * max(intervals) + 1


def test_without_the_commit_gate_a_slow_link_costs_many_steps(run: Runner) -> None:
    # Training runs away from its replicas; no buffer is free before an acknowledgement, so the last restorable step stays.
    cell = Cell(program=FSDP2, steps=30, faults=(replace(NODE[0], step=20),))
    outcome = run(in_workers(in_agents(cell, "slow_link"), "commit_gate"))
    assert outcome.named("recovery_planned")[-1]["resume_step"] < 10, outcome.story
