"""However a job ends, nothing of it is left: no process, no socket, no temporary file, no memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from e2e_harness import FSDP2, SCRIPTS, Cell, Job, Runner, assert_clean, running

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
HERE = Path(__file__).parent


def test_an_error_of_the_script_ends_the_job_with_its_message(run: Runner) -> None:
    script = (str(HERE / "scripts" / "user_error.py"), str(SCRIPTS / FSDP2.script))
    outcome = run(Cell(program=FSDP2, script=script))
    assert outcome.exit_code == 1
    (stopped,) = outcome.named("job_stopped")
    assert "ValueError: sample 3 has a tear in it" in stopped["reason"]
    assert "slot 1" in stopped["reason"]
    # It was tried again, for it might have been the machine; but once, as the message says that it is the program.
    assert {event["slot"] for event in outcome.named("worker_lost")} == {1}
    assert len(outcome.named("worker_lost")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_launcher_is_ended(number: signal.Signals, start: Start) -> None:
    with start(Cell(program=FSDP2, steps=400)) as job:
        job.wait_for("step_committed", step=5)
        # The whole group, as the terminal does it; the launcher's children in it included.
        os.killpg(job.process.pid, number)
        outcome = job.finish()
    assert not outcome.leftovers, outcome.leftovers
    assert outcome.exit_code == (-number if number is signal.SIGKILL else 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_launcher_is_ended_while_it_has_a_fork_server_of_its_own(number: signal.Signals, tmp_path: Path) -> None:
    cell = Cell(program=FSDP2, steps=400, spares=0, run_arguments=("--preload", "torch"))
    with running(cell, tmp_path, None) as job:
        job.wait_for("step_committed", step=5)
        os.kill(job.process.pid, number)
        outcome = job.finish()
    assert not outcome.leftovers, outcome.leftovers


def test_the_launcher_is_killed_in_the_middle_of_a_recovery(start: Start) -> None:
    with start(Cell(program=FSDP2, steps=400)) as job:
        job.wait_for("step_committed", step=5)
        job.kill_node("node0")
        job.wait_for("recovery_started")
        os.kill(job.process.pid, signal.SIGKILL)
        outcome = job.finish()
    assert not outcome.leftovers, outcome.leftovers


def test_a_job_without_a_spare_ends_when_a_node_is_lost(start: Start) -> None:
    with start(Cell(program=FSDP2, steps=400, spares=0, run_arguments=("--spare-wait-s", "1"))) as job:
        job.wait_for("step_committed", step=5)
        job.kill_node("node1")
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == 75
    assert "no spare" in outcome.named("job_stopped")[0]["reason"]
