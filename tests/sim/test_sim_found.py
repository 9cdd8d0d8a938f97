"""Seeds that have found a bug once, each with its story. What was wrong has a test of its own as well, for seeds change with the model."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap.sim.cli import simulate

FOUND: dict[tuple[int, str], dict[str, Any]] = {
    (3886, "a new coordinator waited a minute for nodes that were all there"): {},
    (8405, "a node lost after that wait ended the job, as if it had been waited for"): {},
    (4956, "the checker took a lone node's steps for the job's after the job had gone on without it"): {},
    (5037, "the state that all agreed on was written over for one whose comparison a fence had ended"): {},
    (5905, "what nodes had of it as members in other places was freed when training went on"): {},
    (6401, "what a node had of it that had given its place to another was freed"): {},
    (
        7153,
        "a slot that came back to what was kept of it had memory that a rehearsal had reserved, which was too small",
    ): {},
    (181, "without a log a number was given to a second membership"): {
        "coordinators": 1,
        "faults": 14,
        "event_log": False,
        "durable_steps": 0,
        "integrity": 0,
        "replicas": 1,
    },
    (6513, "what a node had of it that had lost a worker was freed"): {},
}


@pytest.mark.parametrize(("found", "setup"), FOUND.items(), ids=[str(seed) for seed, _ in FOUND])
def test_what_was_found_stays_fixed(found: tuple[int, str], setup: dict[str, Any]) -> None:
    seed, story = found
    outcome = simulate(seed, **setup)
    assert outcome.violation == "", f"{story}, and again: {outcome.violation}"
