"""Jobs for which no node comes in time go on with fewer, and with all again when nodes come, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from test_sim_drains import disturbed, events

from hotswap.errors import EXIT_OK, EXIT_REQUEUE
from hotswap.sim.job import JobModel

SEEDS = 6
SIZES: dict[str, Any] = {
    "nodes_active": 4,
    "spares": 0,
    "nodes_min": 1,
    "spare_wait_s": 0.5,
    "durable_steps": 50,
    "coordinators": 1,
}


def codes(jobs: list[JobModel]) -> list[int]:
    return [job.exit.exit_code for job in jobs if job.exit is not None]


def resized(jobs: list[JobModel]) -> list[tuple[int, int]]:
    return [(event["before"], event["now"]) for event in events(jobs, "job_resized")]


def test_a_lost_node_costs_half_of_the_nodes_for_a_while_and_no_committed_step() -> None:
    jobs = [disturbed(seed, "node", 8.0, **SIZES) for seed in range(SEEDS)]
    assert codes(jobs) == [EXIT_OK] * SEEDS
    assert resized(jobs).count((4, 2)) == SEEDS
    assert resized(jobs).count((2, 4)) > SEEDS / 4
    assert events(jobs, "committed_steps_lost") == []
    grown = [event for event in events(jobs, "recovery_done") if "nodes have come" in event["cause"]]
    assert grown and all(event["redone_steps"] == 0 for event in grown)


@pytest.mark.parametrize("kind", ["coordinator", "worker", "node", "full storage", "partition"])
def test_whatever_happens_while_the_size_changes(kind: str) -> None:
    """The second fault strikes when the wait has just begun, while state goes to storage, or while all start anew."""
    jobs = [disturbed(seed, ("node", kind), 8.0, 8.1 + 0.6 * seed, **SIZES) for seed in range(SEEDS)]
    assert resized(jobs)
    # A second node that is lost too soon may take the only replica of the first one's state with it.
    safe = {EXIT_OK} if kind in ("coordinator", "worker") else {EXIT_OK, EXIT_REQUEUE}
    assert EXIT_OK in codes(jobs) and safe.issuperset(codes(jobs))
