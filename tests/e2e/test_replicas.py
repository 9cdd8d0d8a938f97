"""With two replicas any two nodes may be lost at the same time, a node and a keeper of its replica included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from e2e_harness import FSDP2, Cell, Job, Outcome, assert_clean, assert_identical

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
FOUR = replace(FSDP2, name="fsdp2-4", nodes=4, width=1)
STEPS = 16


def test_two_neighbours_lost_at_once_cost_nothing(start: Start, reference_of: Callable[[Cell], Outcome]) -> None:
    cell = Cell(program=FOUR, spares=2, steps=STEPS, run_arguments=("--replicas", "2"))
    with start(cell) as job:
        job.wait_for("step_committed", step=3)
        job.kill_node("node1")
        job.kill_node("node2")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    first, *after = outcome.named("recovery_planned")
    assert first["push"] == 4 and after, after
    # Slot 1 is held by the nodes 2 and 3, slot 2 by 3 and 0: one of each is left.
    assert {after[-1]["sources"][slot] for slot in ("1", "2")} == {"replica"}, after
    assert not outcome.named("committed_steps_lost")
    assert len(outcome.named("spare_promoted")) == 2
