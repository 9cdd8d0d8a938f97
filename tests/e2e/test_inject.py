"""Drills on a running job: ordered through its coordinator, and recovered from bit for bit like what they imitate."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from control_plane import paced
from e2e_harness import FSDP2, Cell, Job, Outcome, assert_clean, assert_identical
from hosts import Hosts, assert_same, needs_hosts

from hotswap.chaos.network import network

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
Reference = Callable[[Cell], Outcome]


def inject(job: Job, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotswap.cli", "inject", str(job.logs), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_and_a_node_are_struck(start: Start, reference_of: Reference) -> None:
    cell = Cell(program=FSDP2, steps=60, run_arguments=("--allow-inject",))
    with start(cell) as job:
        job.wait_for("spare_ready")
        job.wait_for("step_committed", step=3)
        process = json.loads(inject(job, "worker", "--slot", "1", "--json").stdout)
        job.wait_for("recovery_done", cause="worker of slot 1 lost (killed by SIGKILL)")
        node = json.loads(inject(job, "node", "--node", "node1", "--json").stdout)
        left = [pid for pid in node["pids"] if running(pid)]
        agent = job.pids()["agents"]["node1"]
        outcome = job.finish()
    assert (process["outcome"], process["node"], len(process["pids"])) == ("struck", "node0#1", 1)
    assert (node["outcome"], node["node"], node["pids"][0]) == ("struck", "node1#1", agent)
    assert len(node["pids"]) >= 3 and left == [], "an agent and two workers, all gone when the command returned"
    assert_clean(outcome)
    assert_identical(outcome, reference_of(cell))
    assert [(drill["fault"], drill["slot"], drill["node"]) for drill in outcome.named("drill")] == [
        ("worker", 1, "node0#1"),
        ("node", -1, "node1#1"),
    ]
    # On a busy machine both are in one verdict.
    verdicts = outcome.named("diagnosed")
    assert verdicts[-1]["verdict"] == "node_fault" and all(said["drill"] for said in verdicts), verdicts


def running(pid: int) -> bool:
    """There, and not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full_matrix
def test_a_job_that_does_not_allow_it_is_not_struck(start: Start) -> None:
    cell = Cell(program=FSDP2, spares=0)
    with start(cell) as job:
        job.wait_for("step_committed", step=1)
        answer = inject(job, "node", "--node", "node1")
        outcome = job.finish()
    assert answer.returncode == 2 and "--allow-inject" in answer.stderr, answer
    assert_clean(outcome)
    assert outcome.exit_code == 0
    assert outcome.named("drill") == outcome.named("node_lost") == []


@pytest.mark.full_matrix
@needs_hosts
def test_an_order_reaches_nodes_on_other_hosts(reference_of: Reference, tmp_path: Path) -> None:
    """The coordinator is on z; orders come from c, which has nothing of the job but its own logs and the token."""
    cell = replace(paced(160), spares=1)
    with network(("z", "b", "c")) as net, contextlib.closing(Hosts(net, tmp_path, cell)) as job:
        for rank, host in enumerate(("z", "b", "c")):
            where = ("--rdzv-endpoint", f"{net.addresses['z']}:29400", "--node-rank", str(rank))
            job.launch(host, *where, "--detection-budget-s", "8", "--allow-inject")
        placed = job.wait_for("job_started")["nodes"]
        job.wait_for("spare_ready")
        job.wait_for("step_committed")
        trains = [node for node in placed[:2] if not node.startswith("z#")]
        elsewhere = next(node for node in trains if not node.startswith("c#"))
        worker = job.run("c", "inject", str(job.logs("c")), "segv-worker", "--slot", str(placed.index(elsewhere)))
        assert worker.returncode == 0 and f"on {elsewhere}" in worker.stdout, worker
        assert job.wait_for("worker_lost")["node"] == elsewhere
        job.wait_for("recovery_done")
        silent = job.run("c", "inject", str(job.logs("c")), "stop-node", "--node", elsewhere, "--json")
        assert json.loads(silent.stdout)["outcome"] == "struck", silent
        assert job.wait_for("node_lost")["node"] == elsewhere
        job.wait_for("recovery_done")
        assert_same(job.finish("z"), reference_of(Cell(program=cell.program, steps=cell.steps, deadline_s=150.0)))
