"""What a job knows itself gives the verdict without any log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotswap.diagnosis import Blames, Evidence, Verdict, diagnose, facts


@pytest.mark.parametrize(
    ("evidence", "verdict", "rule"),
    [
        (facts.exit_status(-9, rank=3, node="node-4", time=5.0), Verdict.OOM_HOST, "exit.killed"),
        (facts.exit_status(139, rank=3, node="node-4", time=5.0), Verdict.PROCESS_FAULT, "exit.segfault"),
        (facts.exit_status(127, rank=3, node="node-4", time=5.0), Verdict.USER_ERROR, "exit.usage"),
        (facts.silent("node-4", reachable=False, time=5.0), Verdict.NODE_FAULT, "job.node-silent"),
        (facts.silent("node-4", reachable=True, time=5.0), Verdict.UNKNOWN, "job.agent-silent"),
        (facts.nvml("0000:3d:00", node="node-4", time=5.0, ecc_uncorrected=2), Verdict.NODE_FAULT, "nvml.ecc-uncorrected"),
        (facts.nvml("0000:3d:00", node="node-4", time=5.0, row_remap_pending=True), Verdict.TRANSIENT, "nvml.row-remap-pending"),
        (facts.ib_port("mlx5_0/1", node="node-4", time=5.0, state="DOWN"), Verdict.NODE_FAULT, "ib.port-down"),
        (facts.ib_port("mlx5_0/1", node="node-4", time=5.0, state="ACTIVE", link_downed_delta=1), Verdict.TRANSIENT, "ib.link-counter"),
        (facts.file_system("/dev/shm", 99.9, node="node-4", time=5.0), Verdict.OOM_HOST, "shm.nearly-full"),
        (facts.file_system("/scratch", 99.9, node="node-4", time=5.0), Verdict.STORAGE, "disk.nearly-full"),
        (facts.memory_events("low 0\nmax 7\noom 1\noom_kill 1\nodd line\n", node="node-4", time=5.0), Verdict.OOM_HOST, "cgroup.oom-kill"),
    ],
)  # fmt: skip
def test_one_fact(evidence: Evidence, verdict: Verdict, rule: str) -> None:
    found = diagnose([evidence])
    assert (found.verdict, found.rules[0]) == (verdict, rule)
    assert found.culprit.node == "node-4" or found.culprit.kind is Blames.STORAGE


@pytest.mark.parametrize(
    "evidence",
    [
        facts.nvml("0000:3d:00", node="node-4", time=5.0),
        facts.ib_port("mlx5_0/1", node="node-4", time=5.0, state="ACTIVE"),
        facts.file_system("/dev/shm", 40.0, node="node-4", time=5.0),
        facts.memory_events("oom_kill 0\n", node="node-4", time=5.0),
        facts.op_count("dp", 7, rank=1, time=5.0),
    ],
)
def test_a_healthy_fact_is_no_finding(evidence: Evidence) -> None:
    assert diagnose([evidence]).rules == ()


@pytest.mark.parametrize(
    ("counted", "on", "verdict", "rule"),
    [
        (0, "node-4", Verdict.PROCESS_FAULT, "case.killed-not-for-memory"),
        (0, "node-5", Verdict.OOM_HOST, "exit.killed"),
        (1, "node-4", Verdict.OOM_HOST, "cgroup.oom-kill"),
    ],
)
def test_whoever_was_killed_where_nobody_was_killed_for_memory(
    counted: int, on: str, verdict: Verdict, rule: str
) -> None:
    killed = facts.exit_status(-9, rank=3, node="node-4", time=5.0)
    found = diagnose([killed, facts.memory_events(f"oom_kill {counted}", node=on, time=6.0)])
    assert (found.verdict, found.rules[0]) == (verdict, rule)


@pytest.mark.parametrize(
    ("counted", "on", "verdict", "rule"),
    [
        (0, "node-4", Verdict.PROCESS_FAULT, "case.killed-not-for-memory"),
        (0, "node-5", Verdict.OOM_HOST, "exit.killed"),
        (2, "node-4", Verdict.OOM_HOST, "case.killed-as-host-ran-out"),
        (2, "node-5", Verdict.OOM_HOST, "exit.killed"),
    ],
)
def test_whoever_was_killed_where_only_the_whole_host_is_counted(
    counted: int, on: str, verdict: Verdict, rule: str
) -> None:
    killed = facts.exit_status(-9, rank=3, node="node-4", time=5.0)
    found = diagnose([killed, facts.oom_kills(counted, of="host_kills", node=on, time=6.0)])
    assert (found.verdict, found.rules[0]) == (verdict, rule)
    assert found.confident is (rule == "case.killed-as-host-ran-out")


def test_a_host_that_killed_others_for_memory_is_no_finding() -> None:
    assert diagnose([facts.oom_kills(3, of="host_kills", node="node-4", time=5.0)]).rules == ()


def test_who_aborts_before_anything_else_failed_did_it_to_itself() -> None:
    aborted = facts.exit_status(-6, rank=3, node="node-4", time=5.0)
    found = diagnose([aborted])
    assert (found.verdict, found.rules[0], found.culprit.rank) == (Verdict.PROCESS_FAULT, "case.aborted-first", 3)
    # A watchdog ends processes in the same way when a node is gone.
    gone = facts.silent("node-7", reachable=False, time=4.0)
    assert diagnose([gone, aborted]).culprit.node == "node-7"
    assert diagnose([replace(aborted, source="launcher")]).verdict is Verdict.UNKNOWN


def test_what_is_said_about_a_worker_is_read_as_a_line_of_a_log() -> None:
    raised = facts.said("script", "KeyError: 'lr'", rank=1, node="node-4", time=5.0)
    assert (raised.kind, diagnose([raised]).verdict) == ("exception", Verdict.USER_ERROR)
    hung = "hung: slot 1 has not entered operation 63 of dp, in which slots 0, 2 wait"
    found = diagnose([facts.said("agent", hung, rank=1, node="node-4", time=5.0)])
    assert (found.verdict, found.culprit.rank, found.confident) == (Verdict.PROCESS_FAULT, 1, False)


def test_the_rank_that_started_fewer_operations_is_the_suspect() -> None:
    counts = [facts.op_count("dp", 7 if rank == 2 else 9, rank=rank, time=5.0) for rank in range(4)]
    found = diagnose(counts)
    assert (found.verdict, found.culprit.rank) == (Verdict.UNKNOWN, 2)


def test_whom_everybody_blames() -> None:
    found = diagnose([facts.blame("node-9", node=f"node-{node}", time=5.0) for node in range(3)])
    assert (found.verdict, found.culprit.peer) == (Verdict.NODE_FAULT, "node-9")
    assert found.rules[0] == "case.everybody-blames-one"


def test_an_exit_is_explained_by_what_the_gpu_says() -> None:
    found = diagnose(
        [
            facts.exit_status(-6, rank=3, node="node-4", time=6.0),
            facts.exit_status(-9, rank=4, node="node-4", time=6.0),
            facts.nvml("0000:3d:00", node="node-4", time=9.0, recovery_action=1),
        ]
    )
    assert (found.verdict, found.culprit.gpu) == (Verdict.NODE_FAULT, "0000:3d:00")


def test_memory_events_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 2\n", encoding="ascii")
    found = facts.read_memory_events(tmp_path / "memory.events", node="node-4", time=1.0)
    assert found.facts == {"oom_kill": 2}
