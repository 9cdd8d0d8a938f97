"""Strikes reach the process they name, and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.drills import DRILLS
from hotswap.demo.strikes import strike
from hotswap.errors import UsageError


class FakeJob:
    """Two nodes and a spare: agents that lead groups, and in each a "worker" that writes a slot's log."""

    def __init__(self, logs: Path, stack: ExitStack) -> None:
        self.logs = logs
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.workers: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.coordinator = self._sleep(stack)
        for node, slot in (("node0", 0), ("node1", 1), ("node2", 0)):
            self.agents[node] = self._sleep(stack)
            output = logs / node / "gen1" / f"slot{slot}.out"
            output.parent.mkdir(parents=True)
            group = self.agents[node].pid
            self.workers[node, slot] = self._sleep(stack, group=group, output=output)
        agents = {node: process.pid for node, process in self.agents.items()}
        (logs / "pids.json").write_text(json.dumps({"coordinator": self.coordinator.pid, "agents": agents}))
        started = {"event": "recovery_started", "places": ["node0#1", "node1#1"]}
        (logs / "events.jsonl").write_text(json.dumps(started) + "\n{cut")

    def _sleep(self, stack: ExitStack, group: int = 0, output: Path | None = None) -> subprocess.Popen[bytes]:
        target: Any = stack.enter_context(output.open("wb")) if output else subprocess.DEVNULL
        join = partial(os.setpgid, 0, group)
        process = subprocess.Popen(["sleep", "600"], stdout=target, preexec_fn=join)  # noqa: PLW1509 (one thread)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    with ExitStack() as stack:
        yield FakeJob(tmp_path, stack)


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def alive(job: FakeJob) -> set[str]:
    named = {"coordinator": job.coordinator, **job.agents}
    named.update({f"{node}/{slot}": worker for (node, slot), worker in job.workers.items()})
    return {name for name, process in named.items() if process.poll() is None}


EVERYBODY = {"coordinator", "node0", "node1", "node2", "node0/0", "node1/1", "node2/0"}


@pytest.mark.parametrize(
    ("kind", "victim", "dead"),
    [
        # The spare has a worker of slot 0 as well.
        ("worker", {"slot": 0}, {"node0/0"}),
        ("segv-worker", {"slot": 1}, {"node1/1"}),
        ("abort-worker", {"slot": 1}, {"node1/1"}),
        ("node", {"node": "node1"}, {"node1", "node1/1"}),
        ("spare", {"node": "node2"}, {"node2", "node2/0"}),
        ("agent", {"node": "node1"}, {"node1"}),
        ("coordinator", {}, {"coordinator"}),
    ],
)
def test_who_dies(job: FakeJob, kind: str, victim: dict[str, Any], dead: set[str]) -> None:
    strike(job.logs, kind, **victim)
    for name in dead:
        node, _, slot = name.partition("/")
        process = job.workers[node, int(slot)] if slot else {"coordinator": job.coordinator, **job.agents}[node]
        assert process.wait(10) == -DRILLS[kind].number
    assert alive(job) == EVERYBODY - dead


@pytest.mark.parametrize(("kind", "victim"), [("stop-worker", {"slot": 1}), ("stop-node", {"node": "node1"})])
def test_who_stops(job: FakeJob, kind: str, victim: dict[str, Any]) -> None:
    strike(job.logs, kind, **victim)
    os.waitid(os.P_PID, job.workers["node1", 1].pid, os.WSTOPPED | os.WNOWAIT)
    assert state(job.workers["node1", 1]) == "T"
    assert state(job.workers["node0", 0]) != "T"
    os.killpg(job.agents["node1"].pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("kind", "victim", "said"),
    [
        ("worker", {"slot": 7}, "slot 7 has no process on this machine"),
        ("node", {"node": "node9"}, "no node 'node9' here; there are node0, node1, node2"),
    ],
)
def test_a_victim_that_is_not_here_is_refused(job: FakeJob, kind: str, victim: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        strike(job.logs, kind, **victim)
    assert alive(job) == EVERYBODY
