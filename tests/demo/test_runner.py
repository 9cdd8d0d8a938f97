from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.plan import Outside
from hotswap.demo.runner import JobSpec, Tail, explain_failure, run_job
from hotswap.session.faults import FAULTS, Fault, parse

FAKE_JOB = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
directory = Path(sys.argv[1]); logs = directory / "job"
logs.mkdir(parents=True)
(directory / "place").write_text(f"{os.getpid()} {os.getpgrp()} {os.getsid(0)}")
children = {name: subprocess.Popen(["sleep", "60"], start_new_session=True) for name in ("coordinator", "node2")}
def leave(code):
    for child in children.values():
        child.kill(); child.wait()
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: (Path(directory / "asked").touch(), leave(143)))
pids = {"coordinator": children["coordinator"].pid, "agents": {"node2": children["node2"].pid}}
(logs / "pids.json").write_text(json.dumps(pids))
events = (logs / "events.jsonl").open("a", buffering=1)
for step in range(1, 4):
    events.write(json.dumps({"time": time.time(), "event": "step_committed", "generation": 1, "step": step}) + "\\n")
if sys.argv[2] == "hang":
    time.sleep(60)
if sys.argv[2] == "checkpoint":
    time.sleep(0.5)
    assert children["node2"].poll() is None, "struck too early"
    events.write(json.dumps({"time": time.time(), "event": "checkpoint_written", "generation": 1, "step": 2}) + "\\n")
    assert children["node2"].wait(10) == -signal.SIGKILL
elif sys.argv[2] != "quick":
    assert children[sys.argv[2]].wait(10) == -signal.SIGKILL
leave(0)
"""


@dataclass(frozen=True, kw_only=True)
class FakeJob(JobSpec):
    """A job whose launcher is the program above."""

    mode: str = "quick"
    framework: str = "fsdp2"
    train: TrainOptions = field(default_factory=lambda: TrainOptions(layout=Layout(dp=4)))
    nodes: int = 2
    spares: int = 1

    def command(self) -> list[str]:
        return [sys.executable, "-c", FAKE_JOB, str(self.directory), self.mode]


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b'{"a": 1}\n{"a"')
    assert tail.lines() == [{"a": 1}]
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert tail.lines() == [{"a": 2}]


def test_every_event_is_noticed_in_order(tmp_path: Path) -> None:
    seen: list[Any] = []
    assert run_job(FakeJob(directory=tmp_path / "run"), seen.append) == 0
    assert [event["step"] for event in seen if event] == [1, 2, 3]
    assert {} in seen


def test_records_with_a_loss_are_noticed(tmp_path: Path) -> None:
    records = tmp_path / "records" / "slot3.jsonl"
    records.parent.mkdir(parents=True)
    lines = [{"step": 1, "loss": None}, {"step": 1, "loss": (2.0).hex()}]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen: list[Any] = []
    run_job(FakeJob(directory=tmp_path), seen.append)
    assert [event for event in seen if event and event["event"] == "record"] == [{"event": "record", **lines[1]}]


@pytest.mark.parametrize(("kind", "mode"), [("coordinator", "coordinator"), ("spare", "node2")])
def test_outside_kills_strike_and_are_noted(tmp_path: Path, kind: str, mode: str) -> None:
    node = "node2" if kind == "spare" else ""
    spec = FakeJob(directory=tmp_path / "run", mode=mode, outside=(Outside(kind=kind, step=2, node=node),))
    seen: list[Any] = []
    assert run_job(spec, seen.append) == 0
    [death] = [event for event in seen if event and event["event"] == "death"]
    assert (death["kind"], death["node"], death["slot"]) == (kind, node, None)
    assert death["step"] >= 2


def test_a_kill_may_wait_for_an_event(tmp_path: Path) -> None:
    kill = Outside(kind="node", step=2, node="node2", after=("checkpoint_written",))
    assert run_job(FakeJob(directory=tmp_path / "run", mode="checkpoint", outside=(kill,))) == 0
    assert len(Tail(tmp_path / "run" / "faults.jsonl").lines()) == 1
    # A step that is not committed is waited for as well.
    later = replace(kill, step=9)
    run_job(FakeJob(directory=tmp_path / "later", outside=(later,)))
    assert Tail(tmp_path / "later" / "faults.jsonl").lines() == []


def test_a_job_that_does_not_end_is_ended(tmp_path: Path) -> None:
    spec = FakeJob(directory=tmp_path / "run", mode="hang", timeout_s=1.0)
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        run_job(spec)
    assert (spec.directory / "asked").exists()
    assert _left(spec) == []


def test_the_terminal_interrupts_the_demonstration_alone(tmp_path: Path) -> None:
    run_job(FakeJob(directory=tmp_path / "run"))
    pid, group, session = map(int, (tmp_path / "run" / "place").read_text().split())
    assert group == pid != os.getpgrp()
    assert session == os.getsid(0), "a fork server that several jobs share may have workers in its agents' groups"


def test_an_interruption_ends_the_job(tmp_path: Path) -> None:
    spec = FakeJob(directory=tmp_path / "run", mode="hang")

    def interrupt(event: Any) -> None:
        if event:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(spec, interrupt)
    assert (spec.directory / "asked").exists()
    assert _left(spec) == []


def test_a_job_does_not_outlive_a_demonstration_that_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_runner import FakeJob, run_job\n"
        "run_job(FakeJob(directory=Path(sys.argv[2]), mode='hang'))\n"
    )
    demo = subprocess.Popen([sys.executable, "-c", program, str(Path(__file__).parent), str(directory)])
    deadline = time.monotonic() + 20
    while not Tail(directory / "job" / "events.jsonl").lines():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    demo.send_signal(signal.SIGKILL)
    demo.wait()
    spec = FakeJob(directory=directory)
    while _left(spec):
        assert time.monotonic() < deadline, _left(spec)
        time.sleep(0.02)


def _left(spec: JobSpec) -> list[int]:
    """Processes of the fake job that still run."""
    pids = json.loads((spec.logs / "pids.json").read_text())
    return [pid for pid in (pids["coordinator"], *pids["agents"].values()) if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_is_a_hotswap_run_line(tmp_path: Path) -> None:
    train = TrainOptions(layout=Layout(tp=2, pp=2, dp=2), steps=7)
    spec = JobSpec(directory=tmp_path, framework="megatron", train=train, nodes=2, spares=1)
    command = spec.command()
    assert command[command.index("run") + 1 :][:3] == ["--standalone", "--log-dir", str(tmp_path)]
    assert command[command.index("--nnodes") :][:4] == ["--nnodes", "2:3", "--nproc-per-node", "4"]
    script = next(item for item in command if item.endswith(".py"))
    assert Path(script).exists()
    without = JobSpec(directory=tmp_path, framework="megatron", train=train, nodes=2, spares=0).command()
    assert without[without.index("--nnodes") + 1] == "2"


def test_the_launcher_takes_the_command(tmp_path: Path) -> None:
    from hotswap.launch.arguments import parse as parse_run

    train = TrainOptions(layout=Layout(dp=4), steps=7)
    spec = JobSpec(directory=tmp_path, framework="fsdp2", train=train, nodes=2, spares=1)
    options = parse_run(spec.command()[4:])
    assert (options.nodes_active, options.nodes_max, options.nproc_per_node) == (2, 3, 2)
    assert options.spare_positions == 2
    assert Path(options.log_dir) / options.job_id == spec.logs


def test_faults_travel_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "stale")
    fault = Fault(step=1, moment="gather", slot=2, scope="node")
    assert parse(FakeJob(directory=tmp_path, faults=(fault,)).environment()[FAULTS]) == (fault,)
    assert FAULTS not in FakeJob(directory=tmp_path).environment()


def test_a_workers_traceback_explains_before_other_logs(tmp_path: Path) -> None:
    spec = FakeJob(directory=tmp_path)
    for name in ("node0/agent.log", "node0/gen1/slot0.err", "node1/gen1/slot2.err"):
        path = spec.logs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("all is well\n" if "slot0" in name else f"Traceback\n{name} broke\n")
    os.utime(spec.logs / "node0/agent.log", (1, 1))
    explained = explain_failure(spec, [{"event": "job_stopped", "reason": "because"}])
    assert explained.startswith("because\n")
    assert "node1/gen1/slot2.err broke" in explained
    assert "agent.log" not in explained


def test_a_launcher_that_refuses_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("hotswap: no such script\n")
    explained = explain_failure(FakeJob(directory=tmp_path), [])
    assert "without a reason" in explained
    assert "no such script" in explained


def test_nothing_at_all_is_still_explained(tmp_path: Path) -> None:
    assert explain_failure(FakeJob(directory=tmp_path), []) == "the launcher left without a reason"
