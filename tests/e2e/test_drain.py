"""Nodes that are told to leave: replaced while they train, nothing done again, and everything bit for bit the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import DDP, FSDP2, MEGATRON, Cell, Job, Outcome, Program, assert_clean, assert_identical

from hotswap.errors import EXIT_REQUEUE
from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
LONG = 60
Start = Callable[[Cell], AbstractContextManager[Job]]
Reference = Callable[[Cell], Outcome]
SPREAD = replace(FSDP2, name="fsdp2-four-nodes", nodes=4, width=1)


def drain(job: Job, node: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotswap.cli", "drain", str(job.logs), node, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_drained(outcome: Outcome, *nodes: str) -> None:
    """Each was replaced before it left, without a word of loss, and no step was done again."""
    assert sorted(event["node"] for event in outcome.named("node_drained")) == sorted(nodes)
    assert outcome.named("node_lost") == outcome.named("worker_lost") == []
    assert sorted(event["replaces"] for event in outcome.named("spare_promoted")) == sorted(nodes)
    assert all(event["hot"] for event in outcome.named("spare_promoted"))
    assert [event["redone_steps"] for event in outcome.named("recovery_done")[1:]] == [0] * len(nodes)
    assert outcome.named("diagnosed") == []


@pytest.mark.parametrize(
    "program", [pytest.param(MEGATRON, marks=pytest.mark.full_matrix), FSDP2, pytest.param(DDP, marks=pytest.mark.full_matrix)],
    ids=lambda program: program.name,
)  # fmt: skip
def test_a_node_is_drained(program: Program, start: Start, reference_of: Reference) -> None:
    # The last one: the spare stands for the first one's place, and is built for this one before anybody halts.
    last = f"node{program.nodes - 1}"
    cell = Cell(program=program, steps=LONG)
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed", step=5)
        answer = drain(job, last, "--wait", "30")
        outcome = job.finish()
    assert (answer.returncode, answer.stdout) == (0, f"{last} has left\n"), answer
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert_drained(outcome, f"{last}#1")


def tell(job: Job, node: str) -> None:
    """As a scheduler does it: a signal, of which all processes of the node get one."""
    agent = job.pids()["agents"][node]
    for pid in [*job.worker_pids(node), agent]:
        os.kill(pid, signal.SIGUSR1)


@pytest.mark.full_matrix
def test_two_nodes_are_drained_at_once(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=SPREAD, spares=2, steps=2 * LONG, deadline_s=120)
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        tell(job, "node1")
        tell(job, "node3")
        job.wait_for("node_drained")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert sorted(event["node"] for event in outcome.named("node_drained")) == ["node1#1", "node3#1"]
    assert all(event["redone_steps"] == 0 for event in outcome.named("recovery_done"))


@pytest.mark.full_matrix
def test_the_node_is_lost_before_it_is_drained(start: Start, reference_of: Reference) -> None:
    # While the spare builds for its place: an ordinary loss.
    cell = Cell(program=FSDP2, steps=LONG)
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed", step=5)
        tell(job, "node1")
        job.wait_for("node_draining")
        job.kill_node("node1")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert outcome.named("node_drained") == []
    assert [event["replaces"] for event in outcome.named("spare_promoted")] == ["node1#1"]


@pytest.mark.full_matrix
def test_a_worker_is_lost_at_the_moment_of_the_swap(start: Start, reference_of: Reference) -> None:
    fault = Fault(step=30, moment="forward", slot=0, generation=2)
    cell = Cell(program=FSDP2, steps=LONG, faults=(fault,))
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed", step=28)
        tell(job, "node0")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert [event["node"] for event in outcome.named("node_drained")] == ["node0#1"]


@pytest.mark.full_matrix
def test_the_coordinator_is_lost_while_a_node_waits_to_leave(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=2 * LONG, deadline_s=120)
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        tell(job, "node1")
        job.wait_for("node_draining")
        job.kill_coordinator()
        job.wait_for("coordinator_took_over")
        outcome = job.finish()
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert_drained(outcome, "node1#1")


@pytest.mark.full_matrix
def test_without_a_spare_a_checkpoint_is_written_and_another_job_goes_on_from_it(
    start: Start, reference_of: Reference, tmp_path: Path
) -> None:
    # Durable checkpoints far apart: the one that counts was asked for.
    flags = ("--checkpoint-dir", str(tmp_path / "durable"), "--checkpoint-interval", "1000")
    cell = Cell(
        program=FSDP2, spares=0, steps=LONG, run_arguments=(*flags, "--drain-wait-s", "1", "--spare-wait-s", "1")
    )
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        tell(job, "node1")
        left = job.wait_for("node_drained")
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == EXIT_REQUEUE
    assert (left["node"], left["role"]) == ("node1#1", "active")
    (stopped,) = outcome.named("job_stopped")
    assert "no spare" in stopped["reason"]
    (written,) = outcome.named("checkpoint_written")
    # Nothing is lost: what was committed last is on storage.
    assert written["step"] == outcome.named("step_committed")[-1]["step"]
    with start(replace(cell, run_arguments=flags)) as job:
        again = job.finish()
    assert_clean(again)
    (restored,) = again.named("restored_from_checkpoint")
    assert (restored["step"], again.exit_code) == (written["step"], 0)
    assert again.final == reference_of(cell).final
