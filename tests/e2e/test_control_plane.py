"""No coordinator is one too many to lose: another one takes over, and training does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from control_plane import LEASE_S, TWO, ControlPlane, control_plane, wait_until_ended
from e2e_harness import Cell, ForkServer, Job, Outcome, Program, assert_clean, assert_identical, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
Reference = Callable[[Cell], Outcome]
CELL = Cell(program=TWO, deadline_s=90.0)
Begin = Callable[..., tuple[Job, ControlPlane]]


@pytest.fixture
def begin(tmp_path: Path, server_of: Callable[[Program], ForkServer]) -> Iterator[Begin]:
    """A job that trains under two coordinators."""
    with ExitStack() as stack:

        def made(url: str = "", cell: Cell = CELL) -> tuple[Job, ControlPlane]:
            plane = stack.enter_context(control_plane(tmp_path, cell, url))
            started: AbstractContextManager[Job] = running(plane.cell, tmp_path, server_of(cell.program))
            job = stack.enter_context(started)
            return job, plane

        yield made


def train(job: Job) -> None:
    job.wait_for("spare_ready")
    job.wait_for("step_committed")


def lose_a_node(job: Job, name: str = "node1") -> float:
    """Until the spare trains in its place."""
    job.kill_node(name)
    done = job.wait_for("recovery_done")
    return float(done["phases_ms"]["total"]) / 1000


def finish(job: Job, plane: ControlPlane, reference_of: Reference, *, recoveries: int) -> Outcome:
    outcome = job.finish()
    assert_identical(outcome, reference_of(CELL))
    assert_clean(outcome)
    assert len(outcome.named("recovery_done")) == 1 + recoveries, outcome.story
    for server in plane.servers:
        if server.process.poll() is None:
            assert wait_until_ended(server, 4 * LEASE_S) == 0, plane.story()
    return outcome


def test_the_leader_is_killed_and_a_node_after_it(begin: Begin, reference_of: Reference) -> None:
    job, plane = begin()
    train(job)
    killed = plane.leading(job)
    killed.kill()
    assert job.wait_for("coordinator_started")["term"] == 2
    assert job.wait_for("coordinator_took_over")["members"] == 2
    took = lose_a_node(job)
    assert took < 10.0, job.story()
    finish(job, plane, reference_of, recoveries=1)
