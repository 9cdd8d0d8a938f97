"""A node that is slow holds all others up: it is named, and given up where that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_harness import DDP, SCRIPTS, Cell, Outcome, Runner, assert_clean, assert_identical

pytestmark = pytest.mark.e2e
Reference = Callable[[Cell], Outcome]
HERE = Path(__file__).parent
STEPS = 40


def slowed(*flags: str, node: str = "node1", seconds: float = 0.3, everyone: float = 0.05) -> Cell:
    return Cell(
        program=DDP,
        steps=STEPS,
        script=(str(HERE / "scripts" / "slows.py"), str(SCRIPTS / DDP.script)),
        environment={"SLOW": json.dumps({"node": node, "seconds": seconds, "everyone": everyone})},
        run_arguments=("--detection-budget-s", "2", *flags),
    )


def test_a_slow_node_is_named_and_gives_its_place_to_a_spare(run: Runner, reference_of: Reference) -> None:
    cell = slowed("--evict-slow", "2")
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_clean(outcome)
    (slow,) = outcome.named("slow_worker")
    assert (slow["slot"], slow["node"], slow["part"]) == (1, "node1#1", "script"), slow
    assert slow["ms"] - slow["peers_ms"] > 200 and slow["ratio"] > 2, slow
    (promoted,) = outcome.named("spare_promoted")
    assert promoted["replaces"] == "node1#1", promoted
    assert "times as long as its peers" in outcome.named("recovery_done")[-1]["cause"]


@pytest.mark.full_matrix
def test_without_that_policy_it_is_only_named(run: Runner) -> None:
    outcome = run(slowed())
    assert outcome.exit_code == 0
    assert [event["slot"] for event in outcome.named("slow_worker")] == [1]
    assert len(outcome.named("recovery_started")) == 1, "the start"


@pytest.mark.full_matrix
def test_what_slows_everybody_down_names_nobody(run: Runner) -> None:
    outcome = run(slowed("--evict-slow", "2", node="none", everyone=0.3))
    assert outcome.exit_code == 0
    assert not outcome.named("slow_worker")
    assert len(outcome.named("recovery_started")) == 1, "the start"
