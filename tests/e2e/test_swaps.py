"""More than one loss in a job: nodes, spares, several at once, and losses in the middle of a recovery."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from e2e_harness import (
    DDP,
    FSDP2,
    MEGATRON,
    MEGATRON_BF16,
    Cell,
    Job,
    Outcome,
    Program,
    Runner,
    assert_clean,
    assert_identical,
    assert_recovered,
)

from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
LONG = 60
"""Steps of a job that is disturbed from outside while it trains."""
Start = Callable[[Cell], AbstractContextManager[Job]]
Reference = Callable[[Cell], Outcome]
FOUR_NODES = replace(FSDP2, name="fsdp2-four-nodes", nodes=4, width=1)


def node_fault(step: int, slot: int, generation: int = 1) -> Fault:
    return Fault(step=step, moment="backward", slot=slot, scope="node", generation=generation)


@pytest.mark.parametrize("program", [MEGATRON, MEGATRON_BF16, FSDP2, DDP], ids=lambda program: program.name)
def test_two_nodes_are_lost_one_after_the_other(program: Program, run: Runner, reference_of: Reference) -> None:
    faults = (node_fault(2, 0), node_fault(4, program.width, generation=2))
    cell = Cell(program=program, spares=2, faults=faults)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_recovered(outcome, recoveries=2)
    assert [event["position"] for event in outcome.named("spare_promoted")] == [0, 1]


@pytest.mark.parametrize("program", [MEGATRON, FSDP2], ids=lambda program: program.name)
def test_a_promoted_spare_is_lost_too(program: Program, run: Runner, reference_of: Reference) -> None:
    # In the very step of its promotion: what it restored must be in two places again by then, and no step is committed
    # between the two losses, so that they are answered by one recovery.
    cell = Cell(program=program, spares=2, faults=(node_fault(3, 0), node_fault(3, 0, generation=2)))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_recovered(outcome, recoveries=1)
    assert [event["position"] for event in outcome.named("spare_promoted")] == [0, 0]


def test_the_survivor_of_a_swap_is_lost_in_the_redone_step(run: Runner, reference_of: Reference) -> None:
    # Its replicas went to the promoted spare during the recovery; nothing older would do.
    cell = Cell(program=FSDP2, spares=2, faults=(node_fault(3, 0), node_fault(3, 2, generation=2)))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_recovered(outcome, recoveries=1)
    assert [event["position"] for event in outcome.named("spare_promoted")] == [0, 1]


def test_two_workers_of_a_node_are_lost_together(run: Runner, reference_of: Reference) -> None:
    faults = tuple(Fault(step=3, moment="optimizer", slot=slot) for slot in (0, 1))
    cell = Cell(program=FSDP2, faults=faults)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert sorted(event["slot"] for event in outcome.named("worker_lost")) == [0, 1]
    assert outcome.named("spare_promoted") == []


def test_two_nodes_that_hold_nothing_for_each_other_are_lost_together(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FOUR_NODES, spares=2, steps=LONG)
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        job.kill_node("node0")
        job.kill_node("node2")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert sorted(event["position"] for event in outcome.named("spare_promoted")) == [0, 2]


def test_a_survivor_is_lost_during_the_recovery(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FOUR_NODES, spares=2, steps=LONG)
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        job.kill_node("node0")
        job.wait_for("recovery_started")
        job.kill_node("node2")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert sorted(event["position"] for event in outcome.named("spare_promoted")) == [0, 2]


# --- spares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "hot"), [("1", False), ("2", True)])
def test_promotion_to_a_position_that_the_spare_has_built_or_not(
    positions: str, hot: bool, start: Start, reference_of: Reference
) -> None:
    cell = Cell(program=FSDP2, steps=LONG, run_arguments=("--spare-positions", positions))
    with start(cell) as job:
        job.wait_for("spare_ready", positions=[0, 1] if hot else [0])
        job.wait_for("step_committed")
        job.kill_node("node1")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert_recovered(outcome)
    assert [(event["position"], event["hot"]) for event in outcome.named("spare_promoted")] == [(1, hot)]


def test_an_idle_spare_is_lost_and_the_next_loss_takes_the_other(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, spares=2, steps=LONG, faults=(node_fault(50, 0),))
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        job.kill_node("node2")
        job.wait_for("node_lost", role="spare")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    # The loss of the spare cost nothing.
    assert_recovered(outcome)
    assert [event["node"] for event in outcome.named("spare_promoted")] == ["node3#1"]


def test_a_spare_is_lost_while_it_is_promoted(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, spares=2, steps=LONG, faults=(node_fault(20, 0),))
    with start(cell) as job:
        promoted = job.wait_for("spare_promoted")["node"]
        job.kill_node(promoted)
        other = job.wait_for("spare_promoted")["node"]
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert {promoted, other} == {"node2#1", "node3#1"}


def test_a_silent_node_is_replaced_and_its_return_changes_nothing(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, spares=2, steps=LONG, run_arguments=("--detection-budget-s", "4"))
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        group = job.pids()["agents"]["node1"]
        os.killpg(group, signal.SIGSTOP)
        job.wait_for("spare_promoted", position=1)
        job.wait_for("recovery_planned")
        os.killpg(group, signal.SIGCONT)
        outcome = job.finish()
    assert not outcome.leftovers, outcome.leftovers
    assert_identical(outcome, reference_of(cell))
    # The survivors were freed from waiting for it, not ended.
    assert outcome.named("worker_lost") == []


def test_a_stopped_worker_is_ended_and_started_again(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=LONG, run_arguments=("--detection-budget-s", "4"))
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        os.kill(job.worker_pids("node1")[0], signal.SIGSTOP)
        lost = job.wait_for("worker_lost")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert lost["slot"] in (2, 3)
    assert lost["detail"] == "stopped by a signal for more than 1 s"
    assert outcome.named("spare_promoted") == []


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        pytest.param(MEGATRON, LONG, id="megatron", marks=pytest.mark.full_matrix),
        pytest.param(FSDP2, LONG, id="fsdp2"),
        pytest.param(FSDP2, 4 * LONG, id="fsdp2-and-back", marks=pytest.mark.full_matrix),
    ],
)
def test_a_spare_takes_the_place_of_a_node_with_a_lost_worker(
    program: Program, steps: int, start: Start, reference_of: Reference
) -> None:
    swaps = [("node2#1", "node0#1")]
    if steps > LONG:  # and the node, a spare now, takes it back
        swaps.append(("node0#1", "node2#1"))
    cell = Cell(program=program, steps=steps, run_arguments=("--worker-loss", "spare"))
    with start(cell) as job:
        for spare, loser in swaps:
            job.wait_for("spare_ready", node=spare, positions=[0])
            job.wait_for("step_committed")
            os.kill(job.worker_pids(loser.partition("#")[0])[0], signal.SIGKILL)
            job.wait_for("recovery_done")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    redone = [event["redone_steps"] for event in outcome.named("recovery_done")[1:]]
    assert len(redone) == len(swaps) and max(redone) <= 2
    promoted = [(event["node"], event["replaces"], event["hot"]) for event in outcome.named("spare_promoted")]
    assert promoted == [(*swap, True) for swap in swaps]
    assert outcome.named("node_lost") == []


# --- the coordinator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_coordinator_and_a_node_are_lost(when: str, start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=2 * LONG, faults=(node_fault(LONG, 0),))
    with start(cell) as job:
        if when == "after":
            job.wait_for("spare_promoted")
            job.wait_for("recovery_done")
        else:
            job.wait_for("step_committed", step=5)
        job.kill_coordinator()
        job.wait_for("coordinator_took_over")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    # Training went on without a coordinator: the only recovery is the node's.
    assert_recovered(outcome)


def test_the_coordinator_is_lost_during_a_recovery(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=LONG, faults=(node_fault(20, 0),))
    with start(cell) as job:
        job.wait_for("spare_promoted")
        job.kill_coordinator()
        job.wait_for("coordinator_took_over")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert {event["slot"] for event in outcome.named("worker_lost")} == set()


def test_a_node_is_lost_while_there_is_no_coordinator(start: Start, reference_of: Reference) -> None:
    # The new coordinator waits for the lost node as long as for any silent one.
    cell = Cell(program=FSDP2, steps=LONG, run_arguments=("--detection-budget-s", "4"))
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        job.kill_coordinator()
        job.kill_node("node1")
        job.wait_for("spare_promoted", position=1)
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
