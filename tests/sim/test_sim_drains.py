"""Nodes that leave in order, and jobs that find no node in place of one, in virtual time, with nothing else that goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap.errors import EXIT_OK, EXIT_REQUEUE
from hotswap.sim.faults import Fault, Saboteur
from hotswap.sim.job import JobModel

SEEDS = 16
SWAP = "to be replaced before leaving"


def drained(seed: int, *at_s: float, **setup: Any) -> JobModel:
    """A job in which a random node is told to leave at each of these times."""
    return disturbed(seed, "drain", *at_s, **setup)


def disturbed(seed: int, kinds: str | tuple[str, ...], *at_s: float, **setup: Any) -> JobModel:
    """*kinds*: of all faults, or of each."""
    each = (kinds,) * len(at_s) if isinstance(kinds, str) else kinds
    calm = {"faults": 0, "flaky": 0.0, "integrity": 0, "event_log": True, "nodes_min": 0}
    job = JobModel(seed, **{**calm, "steps": 60, "compute_s": (0.1, 0.3), **setup})
    faults = [Fault(kind=kind, moment="time", nth=1, delay_s=s) for kind, s in zip(each, at_s, strict=True)]
    job.saboteur = Saboteur(job, faults)
    job.run()
    return job


def events(jobs: list[JobModel], name: str) -> list[dict[str, Any]]:
    return [event for job in jobs for event in job.log if event["event"] == name]


@pytest.mark.parametrize("at_s", [(8.0,), (8.0, 8.2, 12.0)], ids=len)
def test_nothing_is_done_again(at_s: tuple[float, ...]) -> None:
    jobs = [drained(seed, *at_s, nodes_active=3, spares=3, drain_s=30.0) for seed in range(SEEDS)]
    assert [job.exit.exit_code for job in jobs if job.exit is not None] == [EXIT_OK] * SEEDS
    swaps = [event for event in events(jobs, "recovery_done") if event["cause"] != "start"]
    assert len(swaps) > 1
    assert all(SWAP in event["cause"] and event["redone_steps"] == 0 for event in swaps), swaps
    assert events(jobs, "node_lost") == []
    drained_nodes = [event["node"] for event in events(jobs, "node_drained")]
    assert len(drained_nodes) == len(events(jobs, "node_draining")) > 0.8 * SEEDS


def test_without_spares_a_node_stays_until_its_time_is_up() -> None:
    jobs = [drained(seed, 8.0, nodes_active=3, spares=0, drain_s=0.0, durable_steps=50) for seed in range(SEEDS)]
    released = events(jobs, "node_drained")
    assert len(released) > 0.8 * SEEDS
    assert {event["role"] for event in released} == {"active"}
    # Each with a checkpoint, at a step that no interval has asked for.
    halted = [event["step"] for event in events(jobs, "checkpoint_written") if event["step"] not in (50, 60)]
    assert len(halted) == len(released)
    # The cluster gives another node, and all goes well.
    assert [job.exit.exit_code for job in jobs if job.exit is not None] == [EXIT_OK] * SEEDS


def test_a_job_that_gives_up_has_its_newest_state_on_storage() -> None:
    waits = {"spare_wait_s": 2.5, "durable_steps": 50}
    jobs = [disturbed(seed, "node", 8.0, nodes_active=3, spares=0, **waits) for seed in range(SEEDS)]
    given_up = [job for job in jobs if job.exit is not None and job.exit.exit_code == EXIT_REQUEUE]
    assert len(given_up) > SEEDS / 2
    for job in given_up:
        assert job.exit is not None and "is on storage" in job.exit.reason
        saved = job.storage.latest()
        assert saved is not None and saved >= job.chronicle.committed[0]
