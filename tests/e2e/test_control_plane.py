"""No coordinator is one too many to lose: another one takes over, and training does not notice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from control_plane import LEASE_S, ControlPlane, Server, control_plane, paced, store, wait_until_ended
from e2e_harness import Cell, Event, ForkServer, Job, Outcome, Program, assert_clean, assert_identical, running
from etcd_cluster import cluster, require_etcd

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
Reference = Callable[[Cell], Outcome]
CELL = paced()
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


def succeeded(job: Job, leader: Server) -> Event:
    """Another one leads, in a later term."""
    terms = [event["term"] for event in job.events if event["event"] == "coordinator_started"]
    while (started := job.wait_for("coordinator_started"))["pid"] == leader.process.pid:
        pass  # On a machine that is this busy a lease may be lost and won again.
    assert started["term"] > terms[-1]
    return started


def lose_a_node(job: Job, name: str = "node1") -> float:
    """Until the spare trains in its place."""
    job.kill_node(name)
    done = job.wait_for("recovery_done")
    return float(done["phases_ms"]["total"]) / 1000


def finish(
    job: Job, plane: ControlPlane, reference_of: Reference, *, recoveries: int, refused: bool = False
) -> Outcome:
    outcome = job.finish()
    assert_identical(outcome, reference_of(Cell(program=job.cell.program, steps=job.cell.steps)))
    if refused:
        assert not outcome.leftovers and not outcome.named("event_refused"), outcome.story
    else:
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
    succeeded(job, killed)
    assert job.wait_for("coordinator_took_over")["members"] == 2
    took = lose_a_node(job)
    assert took < 10.0, job.story()
    finish(job, plane, reference_of, recoveries=1)


@pytest.mark.full_matrix
def test_a_node_is_drained_while_the_coordinator_that_was_named_first_is_gone(
    begin: Begin, reference_of: Reference
) -> None:
    job, plane = begin()
    train(job)
    killed = plane.servers[0]
    killed.kill()
    command = [sys.executable, "-m", "hotswap.cli", "drain", str(job.logs), "node1", "--wait", "60"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (said.returncode, said.stdout) == (0, "node1 has left\n"), said
    outcome = finish(job, plane, reference_of, recoveries=1)
    assert [event["node"] for event in outcome.named("node_drained")] == ["node1#1"]
    assert outcome.named("recovery_done")[-1]["redone_steps"] == 0, outcome.story


@pytest.mark.full_matrix
def test_a_leader_that_stands_still_has_nothing_to_say_when_it_goes_on(begin: Begin, reference_of: Reference) -> None:
    job, plane = begin()
    train(job)
    frozen = plane.leading(job)
    frozen.signal(signal.SIGSTOP)
    succeeded(job, frozen)
    job.wait_for("coordinator_took_over")
    # Its connections were open all the time, but its agents have left it for one that speaks.
    lose_a_node(job)
    frozen.signal(signal.SIGCONT)
    job.wait_for("coordinator_stepped_down", pid=frozen.process.pid)
    # Agents have knocked at its door meanwhile, and gone away.
    finish(job, plane, reference_of, recoveries=1, refused=True)


@pytest.mark.full_matrix
def test_a_leader_that_is_told_to_end_lets_another_one_lead_at_once(begin: Begin, reference_of: Reference) -> None:
    job, plane = begin()
    train(job)
    left = plane.leading(job)
    left.signal(signal.SIGTERM)
    stepped_down = job.wait_for("coordinator_stepped_down", pid=left.process.pid)
    started = succeeded(job, left)
    assert left.wait() == 128 + signal.SIGTERM
    assert started["time"] - stepped_down["time"] < LEASE_S, "it has waited for the lease to end"
    finish(job, plane, reference_of, recoveries=0)


@pytest.mark.full_matrix
def test_while_nobody_leads_training_goes_on_and_a_loss_waits(begin: Begin, reference_of: Reference) -> None:
    """The store is gone, so all coordinators stand by. It comes back with all that it knew."""
    job, plane = begin(cell=paced(160))
    train(job)
    assert plane.store is not None
    port = plane.store.port
    plane.store.kill()
    job.wait_for("coordinator_stepped_down")
    job.kill_node("node1")
    time.sleep(LEASE_S)  # Nothing may happen now; if it did, it would be in the log by then.
    before = len(job.events)
    plane.store = store(Path(plane.store.log).parent, port)
    job.wait_for("coordinator_started")
    assert not [event for event in job.events[:before] if event["event"] == "spare_promoted"]
    job.wait_for("recovery_done")
    outcome = job.finish()
    assert_identical(outcome, reference_of(Cell(program=job.cell.program, steps=job.cell.steps)))
    assert_clean(outcome)


@pytest.mark.full_matrix
@pytest.mark.etcd
def test_with_etcd_a_member_is_killed_then_the_leader_then_a_node(
    begin: Begin, tmp_path: Path, reference_of: Reference
) -> None:
    require_etcd()
    with cluster(tmp_path / "etcd") as etcd:
        job, plane = begin(etcd.url, paced(200))
        train(job)
        etcd.leader().kill()
        job.wait_for("step_committed")
        killed = plane.leading(job)
        killed.kill()
        succeeded(job, killed)
        job.wait_for("coordinator_took_over")
        lose_a_node(job)
        outcome = job.finish()
        assert_identical(outcome, reference_of(Cell(program=job.cell.program, steps=job.cell.steps)))
        assert_clean(outcome)
        assert len(outcome.named("recovery_done")) == 2, outcome.story
