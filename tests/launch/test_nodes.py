"""Several launchers, as on several machines, with the real coordinator, agents and workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_kit import alive, until

from hotswap.launch.place import free_port

# Three launchers import torch at the same time, and wait for each other.
pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 90.0
STEPS = 20
SCRIPT = str(Path(__file__).parent / "train_tiny.py")


class Node:
    """One launcher."""

    def __init__(self, name: str, directory: Path, flags: list[str], token_file: Path) -> None:
        self.name = name
        self.logs = directory / name / "job"
        self.console = directory / f"{name}.log"
        own = ["--node-name", name, "--log-dir", str(directory / name), "--token-file", str(token_file)]
        with self.console.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hotswap.cli", "run", *flags, *own, SCRIPT, str(STEPS), str(directory / "go")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def events(self) -> list[dict[str, object]]:
        path = self.logs / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, name: str, **fields: object) -> None:
        """Until such an event is in its log."""
        end = time.monotonic() + DEADLINE_S
        while not any(event["event"] == name and fields.items() <= event.items() for event in self.events()):
            assert self.process.poll() is None, self.story(f"the launcher ended before {name} {fields}")
            assert time.monotonic() < end, self.story(f"no {name} {fields} within {DEADLINE_S:g} s")
            time.sleep(0.005)

    def story(self, why: str) -> str:
        events = [json.dumps(event)[:300] for event in self.events() if event["event"] != "step_committed"]
        return "\n".join([why, *events, self.console.read_text()])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef0123456789abcdef")
    token_file.chmod(0o600)
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    # A busy machine's replicas are late: a snapshot of each step all the same, or the one before the held step may have none. Its
    # nodes may be silent as well, and one that is lost for that would use up the spare; deaths are noticed at once all the same.
    patient = ["--overhead-limit", "0", "--detection-budget-s", "30"]
    flags = ["--nnodes", "2:3", "--nproc-per-node", "1", *patient, *endpoint]
    made = [Node(name, tmp_path, [*flags, "--node-rank", str(rank)], token_file) for rank, name in enumerate("abc")]
    yield made
    for node in made:
        node.close()


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


@pytest.mark.e2e
def test_a_machine_is_lost_and_the_spare_takes_its_place(nodes: list[Node], tmp_path: Path) -> None:
    first = nodes[0]
    first.wait_for("spare_ready")
    first.wait_for("step_committed", step=10)
    places = next(event["places"] for event in first.events() if event["event"] == "recovery_started")
    assert isinstance(places, list)
    lost = next(node for node in nodes[1:] if any(place.startswith(f"{node.name}#") for place in places))
    family = descendants(lost.process.pid)
    assert len(family) >= 2
    (tmp_path / "go").touch()
    os.kill(lost.process.pid, signal.SIGKILL)
    first.wait_for("spare_promoted")
    for node in nodes:
        if node is not lost:
            assert node.process.wait(DEADLINE_S) == 0, node.story("it ended with an error")
    assert lost.process.wait() == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in family))
    assert f"[slot0] finished at {STEPS}" in "".join(node.console.read_text() for node in nodes)


@pytest.mark.e2e
def test_a_machine_is_told_to_leave_and_the_spare_takes_its_place(nodes: list[Node], tmp_path: Path) -> None:
    first = nodes[0]
    first.wait_for("spare_ready")
    first.wait_for("step_committed", step=10)
    places = next(event["places"] for event in first.events() if event["event"] == "recovery_started")
    assert isinstance(places, list)
    leaver = next(node for node in nodes[1:] if any(place.startswith(f"{node.name}#") for place in places))
    # As Slurm does it: everything of the step gets the signal.
    for pid in [leaver.process.pid, *descendants(leaver.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    # The spare stands for another place, and builds for this one first.
    first.wait_for("halt_asked")
    (tmp_path / "go").touch()
    for node in [leaver, *(node for node in nodes if node is not leaver)]:
        assert node.process.wait(DEADLINE_S) == 0, node.story("it ended with an error")
    assert "this node leaves as soon as another one has its place" in leaver.console.read_text()
    names = [event["event"] for event in first.events()]
    assert "node_drained" in names and "worker_lost" not in names and "node_lost" not in names
