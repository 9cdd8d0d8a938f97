"""A bit that flips in one slot's memory: found by comparison with its peers, named, and undone from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import DDP, MEGATRON, Cell, Outcome, Program, Runner, assert_clean, assert_identical

from hotswap.demo.options import Layout, TrainOptions
from hotswap.errors import EXIT_REQUEUE
from hotswap.replication.durable_index import latest
from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
Reference = Callable[[Cell], Outcome]


def flipped(program: Program, scope: str, *, slot: int = 1, every: int = 1, step: int = 3, **more: int) -> Cell:
    """Flipped during backward, so that the gradients of everybody are wrong as well."""
    fault = Fault(step=step, moment="backward", slot=slot, scope=scope, **more)
    return Cell(program=program, faults=(fault,), run_arguments=("--integrity-every", str(every)))


@pytest.mark.parametrize(
    ("scope", "every"),
    [
        pytest.param("flip-bit", 1, marks=pytest.mark.full_matrix),
        pytest.param("flip-bit", 2, marks=pytest.mark.full_matrix),
        pytest.param("flip-moment", 1, marks=pytest.mark.full_matrix),
        ("flip-moment", 2),
    ],
)
def test_the_odd_slot_of_three_is_named_and_repaired_from_its_peers(
    scope: str, every: int, run: Runner, reference_of: Reference
) -> None:
    cell = flipped(DDP, scope, every=every)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_clean(outcome)
    (found,) = outcome.named("state_differs")
    assert (found["odd"], found["undecided"], found["nodes"]) == ([1], [], ["node1#1"])
    assert found["verified"] < 3 <= found["step"], found
    assert ("state" in found["detail"]) == (scope == "flip-moment"), found
    (lost,) = outcome.named("worker_lost")
    assert lost["slot"] == 1 and lost["detail"].startswith("its state differs from that of its peers"), lost
    planned = outcome.named("recovery_planned")[-1]
    assert planned["resume_step"] == found["verified"]
    assert planned["sources"]["1"] == "replica", planned


@pytest.mark.full_matrix
@pytest.mark.parametrize("scope", ["flip-bit", "flip-moment"])
def test_two_that_differ_stop_the_job_and_are_both_named(scope: str, run: Runner) -> None:
    two = Program(
        name="ddp-2",
        script=DDP.script,
        train=TrainOptions(**{**vars(DDP.train), "layout": Layout(dp=2)}),
        nodes=2,
        width=1,
    )
    outcome = run(flipped(two, scope))
    assert outcome.exit_code == EXIT_REQUEUE, outcome.story
    (found,) = outcome.named("state_differs")
    assert (found["odd"], found["undecided"], found["verified"]) == ([], [0, 1], 2), found
    (stopped,) = outcome.named("job_stopped")
    assert "nobody can tell which one is right" in stopped["reason"] and "node1#1" in stopped["reason"], stopped
    assert not outcome.leftovers


@pytest.mark.full_matrix
def test_gathered_parameters_are_compared_where_the_optimizer_is_distributed(run: Runner) -> None:
    """They are made anew from main parameters with every update: only the gradients would have been wrong."""
    outcome = run(flipped(MEGATRON, "flip-bit", slot=5))
    assert outcome.exit_code == EXIT_REQUEUE, outcome.story
    (found,) = outcome.named("state_differs")
    assert len(found["undecided"]) == 2 and 5 in found["undecided"], found


@pytest.mark.full_matrix
def test_durable_checkpoints_are_made_of_what_all_agree_on(
    run: Runner, reference_of: Reference, tmp_path: Path
) -> None:
    """The state of step 4 is wrong; that of step 2 is what an interrupted job may begin from."""
    checkpoints = ("--checkpoint-dir", str(tmp_path / "durable"), "--checkpoint-interval", "2")
    cell = flipped(DDP, "flip-bit", every=100)
    cell = replace(cell, run_arguments=(*cell.run_arguments, *checkpoints))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_clean(outcome)
    (found,) = outcome.named("state_differs")
    assert (found["verified"], found["step"]) == (2, 4), found
    written = [(event["generation"], event["step"]) for event in outcome.named("checkpoint_written")]
    assert written and (1, 4) not in written, written
    assert latest(tmp_path / "durable") == max(step for _, step in written)
