"""What was killed, and what raised, is found out from real processes' evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import FSDP2, SCRIPTS, Cell, Outcome, Runner, assert_identical

from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
FAILING = Cell(program=FSDP2, script=(str(HERE / "scripts" / "user_error.py"), str(SCRIPTS / FSDP2.script)))


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


def test_an_error_of_one_slots_code_is_the_codes(run: Runner) -> None:
    outcome = run(replace(FAILING, environment={"FAILING_RANKS": "1"}))
    assert outcome.exit_code == 1
    found = outcome.named("diagnosed")[-1]
    assert (found["verdict"], found["action"], found["confident"]) == ("user_error", "stop_with_report", True)
    assert found["culprit"]["rank"] == 1
    assert any("sample 3 has a tear in it" in line["text"] for line in found["deciding"])


def test_an_error_on_all_slots_is_not_tried_again(run: Runner) -> None:
    outcome = run(replace(FAILING, environment={"FAILING_RANKS": "0,1,2,3"}))
    assert outcome.exit_code == 1
    assert len(outcome.named("recovery_started")) == 1, "the start"
    (stopped,) = outcome.named("job_stopped")
    assert "in the same way on all 4 slots: ValueError: sample 3 has a tear in it" in stopped["reason"]
