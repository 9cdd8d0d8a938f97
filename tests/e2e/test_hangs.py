"""Workers that live and do not advance: the one that keeps the others waiting is named, asked where it is, and replaced."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    DDP,
    FSDP2,
    MEGATRON,
    SCRIPTS,
    Cell,
    Job,
    Outcome,
    Program,
    Runner,
    assert_clean,
    assert_identical,
)

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
Reference = Callable[[Cell], Outcome]
HERE = Path(__file__).parent
DEFAULTS = ("--detection-budget-s", "2")
"""The harness asks for a long budget, since its machine is busy; here the default is what is tested."""


def hanging(
    program: Program, kind: str, *, slots: Sequence[int] = (1,), flags: Sequence[str] = (), **more: Any
) -> Cell:
    hang = json.dumps({"kind": kind, "step": 3, "slots": [*slots], **more})
    return Cell(
        program=program,
        script=(str(HERE / "scripts" / "hangs.py"), str(SCRIPTS / program.script)),
        environment={"HANG": hang},
        run_arguments=(*DEFAULTS, "--hang-budget-s", "3", *flags),
    )


@pytest.mark.parametrize(
    ("program", "kind", "where"),
    [
        (FSDP2, "lock", "lock"),
        (DDP, "loader", "loader"),
        (FSDP2, "native", "native"),
        (MEGATRON, "lock", "lock"),
        (MEGATRON, "skip", ""),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_who_keeps_the_others_waiting_is_named_and_replaced(
    program: Program, kind: str, where: str, run: Runner, reference_of: Reference
) -> None:
    cell = hanging(program, kind)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    (found,) = outcome.named("hang_found")
    assert found["culprits"] == [1], found
    (stacks,) = outcome.named("worker_stacks")
    assert (stacks["slot"] == 1 and 'hangs.py", line' in stacks["stacks"]) or not where, stacks
    assert where in stacks["stacks"] and "most recent call first" in stacks["stacks"]
    (lost,) = outcome.named("worker_lost")
    assert lost["slot"] == 1 and lost["detail"].startswith("hung: slot 1 has not entered operation")


@pytest.mark.full_matrix
def test_a_hang_that_comes_back_moves_to_another_node(run: Runner, reference_of: Reference) -> None:
    cell = hanging(FSDP2, "lock", times=2)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert [event["culprits"] for event in outcome.named("hang_found")] == [[1], [1]]
    assert [event["replaces"] for event in outcome.named("spare_promoted")] == ["node0#1"]


@pytest.mark.full_matrix
def test_a_hang_that_comes_back_everywhere_ends_the_job(run: Runner) -> None:
    outcome = run(hanging(FSDP2, "lock", times=9, slots=(1,)))
    assert outcome.exit_code == 93
    (stopped,) = outcome.named("job_stopped")
    assert "step 3 hangs for the 3rd time in the same place" in stopped["reason"]
    assert len(outcome.named("hang_found")) == 3


@pytest.mark.full_matrix
def test_all_workers_that_are_busy_elsewhere_are_reported_and_left_alone(run: Runner, reference_of: Reference) -> None:
    cell = hanging(FSDP2, "pause", slots=range(4), seconds=12, flags=("--hang-budget-s", "2.5"))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert len(outcome.named("all_paused")) == 1
    assert outcome.named("hang_found") == outcome.named("worker_lost") == []


def test_a_pause_beyond_the_limit_for_it_is_a_hang(run: Runner, reference_of: Reference) -> None:
    cell = hanging(DDP, "pause", slots=range(3), seconds=1000, flags=("--pause-limit-s", "6"))
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    (found,) = outcome.named("hang_found")
    assert found["culprits"] == [0, 1, 2] and "outside of collectives for 6 s" in found["why"]


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_stopped_worker_is_replaced_within_three_seconds(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=60, run_arguments=DEFAULTS)
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        pid = job.worker_pids("node1")[0]
        os.kill(pid, signal.SIGSTOP)
        lost = job.wait_for("worker_lost")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert lost["detail"] == "stopped by a signal for more than 0.5 s"
