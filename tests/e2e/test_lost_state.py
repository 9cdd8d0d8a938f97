"""A slot's owner and all holders of its replica are lost together: the durable checkpoint, or a clear end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import FSDP2, MEGATRON, Cell, Job, Outcome, Program, assert_clean, assert_identical

from hotswap.errors import EXIT_REQUEUE

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
INTERVAL = 10


def _lose_both_nodes(job: Job) -> None:
    job.kill_node("node0")
    job.kill_node("node1")


@pytest.mark.parametrize(
    ("program", "steps"), [(FSDP2, 60), (MEGATRON, 30)], ids=lambda value: getattr(value, "name", "")
)
def test_the_job_goes_on_from_the_durable_checkpoint(
    program: Program, steps: int, start: Start, reference_of: Callable[[Cell], Outcome], tmp_path: Path
) -> None:
    durable = ("--checkpoint-dir", str(tmp_path / "durable"), "--checkpoint-interval", str(INTERVAL))
    cell = Cell(program=program, spares=2, steps=steps, run_arguments=durable)
    with start(cell) as job:
        written = job.wait_for("checkpoint_written")["step"]
        job.wait_for("step_committed")
        _lose_both_nodes(job)
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    (restored,) = outcome.named("restored_from_checkpoint")
    assert restored["step"] >= written and restored["step"] % INTERVAL == 0
    assert set(outcome.named("recovery_planned")[-1]["sources"].values()) == {"checkpoint"}


def test_without_a_checkpoint_the_job_ends_and_says_why(start: Start) -> None:
    cell = Cell(program=FSDP2, spares=2, steps=60)
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        _lose_both_nodes(job)
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == EXIT_REQUEUE
    (stopped,) = outcome.named("job_stopped")
    assert "owner" in stopped["reason"] and "--checkpoint-dir" in stopped["reason"]


def test_without_a_spare_the_newest_state_goes_to_storage_before_the_job_ends(
    start: Start, reference_of: Callable[[Cell], Outcome], tmp_path: Path
) -> None:
    # Durable checkpoints far apart: the one that counts is made of what the survivor has of its own and of the lost node's slots.
    durable = ("--checkpoint-dir", str(tmp_path / "durable"), "--checkpoint-interval", "1000")
    cell = Cell(program=FSDP2, spares=0, steps=30, run_arguments=(*durable, "--spare-wait-s", "0.5"))
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        job.kill_node("node1")
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == EXIT_REQUEUE
    (stopped,), (written,) = outcome.named("job_stopped"), outcome.named("checkpoint_written")
    assert f"the state of step {written['step']} is on storage" in stopped["reason"]
    assert written["step"] >= outcome.named("step_committed")[-1]["step"]
    with start(replace(cell, run_arguments=durable)) as job:
        again = job.finish()
    assert_clean(again)
    assert (again.named("restored_from_checkpoint")[0]["step"], again.exit_code) == (written["step"], 0)
    assert again.final == reference_of(cell).final


@pytest.mark.full_matrix
def test_storage_that_refuses_everything_costs_checkpoints_and_nothing_else(
    start: Start, reference_of: Callable[[Cell], Outcome], tmp_path: Path
) -> None:
    storage = tmp_path / "durable"
    durable = ("--checkpoint-dir", str(storage), "--checkpoint-interval", "2")
    cell = Cell(program=FSDP2, steps=20, run_arguments=durable)
    with start(cell) as job:
        job.wait_for("checkpoint_written")
        # A file where the directory was: whoever may do everything on a read-only disk cannot write here either.
        storage.rename(tmp_path / "gone")
        storage.write_text("")
        job.wait_for("step_committed")
        job.kill_node("node1")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert {event["cause"] for event in outcome.named("recovery_done")} != {"start"}
