"""Runs one training job under ``hotswap run`` and reports what happens while it happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.demo import strikes
from hotswap.demo.options import TrainOptions
from hotswap.demo.plan import FRAMEWORKS, XID, Outside
from hotswap.node.process import die_with_parent
from hotswap.session.faults import FAULT_LOG, FAULTS, Fault

POLL_S = 0.05
END_S = 20.0
JOB_S_MAX = 600.0
Notice = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One training job below ``directory``; *faults* strike from inside, *outside* from outside."""

    directory: Path
    framework: str
    train: TrainOptions
    nodes: int
    spares: int
    faults: tuple[Fault, ...] = ()
    outside: tuple[Outside, ...] = ()
    run_arguments: tuple[str, ...] = ()
    timeout_s: float = JOB_S_MAX

    @property
    def logs(self) -> Path:
        """Where the launcher puts everything of this job."""
        return self.directory / "job"

    @property
    def fault_log(self) -> Path:
        """One line for each death, with its time."""
        return self.directory / "faults.jsonl"

    def command(self) -> list[str]:
        """The ``hotswap run`` line of a job on this machine."""
        place = ("--standalone", "--log-dir", str(self.directory))
        return [sys.executable, "-m", "hotswap.cli", *self.arguments(*place)]

    def arguments(self, *place: str) -> list[str]:
        """Of ``hotswap``, for one launcher of the job; *place* are its options for where it is and logs to."""
        framework = FRAMEWORKS[self.framework]
        nodes = f"{self.nodes}:{self.nodes + self.spares}" if self.spares else str(self.nodes)
        return [
            *("run", *place, "--nnodes", nodes, "--nproc-per-node", str(self.train.layout.slots // self.nodes)),
            *("--rdzv-id", self.logs.name, "--redirects", "3"),
            *("--preload", f"torch,{framework.module}"),
            # A snapshot of every step, also where eight workers share two cores.
            *("--spare-positions", str(self.nodes), "--overhead-limit", "0", *self.run_arguments),
            str(Path(__file__).with_name(framework.script)),
            *self.train.to_arguments(),
            *("--out", str(self.directory)),
        ]

    def environment(self) -> dict[str, str]:
        """This process's environment with the deaths on order."""
        environment = {**os.environ, FAULT_LOG: str(self.fault_log), "OMP_NUM_THREADS": "1"}
        environment.pop(FAULTS, None)
        if self.faults:
            environment[FAULTS] = json.dumps([vars(fault) for fault in self.faults])
        return environment


class Tail:
    """New whole lines of a file that grows; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        """*path*: the file."""
        self._path = path
        self._at = 0

    def lines(self) -> list[dict[str, Any]]:
        """What was appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def run_job(spec: JobSpec, notice: Notice = lambda _: None) -> int:
    """Run the job to its end; its exit code. *notice* gets every event, death and record, in order, and an empty dict when idle.

    Whatever happens, KeyboardInterrupt included, no process of the job is left. The job is ended after ``timeout_s`` seconds.
    """
    spec.directory.mkdir(parents=True, exist_ok=True)
    with _launched(spec) as process:
        watch = _Watch(spec)
        deadline = time.monotonic() + spec.timeout_s
        while process.poll() is None:
            watch.look(notice)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {spec.timeout_s:g} s; logs in {spec.logs}")
        watch.look(notice)
        return int(process.returncode)


@contextlib.contextmanager
def _launched(spec: JobSpec) -> Iterator[subprocess.Popen[bytes]]:
    with (spec.directory / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            spec.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=spec.environment(),
            preexec_fn=_apart,  # noqa: PLW1509 (this program has one thread)
        )
    try:
        yield process
    finally:
        _end(process)


def _apart() -> None:
    """In the launcher, before it is one. Ctrl-C reaches the demonstration alone, which then ends the job in order.

    A group of its own, not a session: workers join the groups of agents, which a fork server of another session may not.
    """
    os.setpgrp()
    die_with_parent(signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The launcher cleans up after itself when it is asked; its children end when it is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    if process.poll() is None:
        process.kill()
        process.wait()


class _Watch:
    """Reads what the job writes, and strikes from outside when it is time."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._due = list(spec.outside)
        self._committed = -1
        self._seen: set[str] = set()
        self._events = Tail(spec.logs / "events.jsonl")
        self._deaths = Tail(spec.fault_log)
        self._records = [
            Tail(spec.directory / "records" / f"slot{slot}.jsonl") for slot in range(spec.train.layout.slots)
        ]

    def look(self, notice: Notice) -> None:
        deaths = [{"event": "death", **line} for line in self._deaths.lines()]
        events = self._events.lines()
        for event in sorted([*deaths, *events], key=lambda item: float(item["time"])):
            notice(event)
            self._seen.add(event["event"])
            if event["event"] == "step_committed":
                self._committed = int(event["step"])
            self._strike()
        for tail in self._records:
            for record in tail.lines():
                if record["loss"] is not None:
                    notice({"event": "record", **record})
        notice({})

    def _strike(self) -> None:
        committed = self._committed
        for kill in [kill for kill in self._due if kill.step <= committed and self._seen.issuperset(kill.after)]:
            self._due.remove(kill)
            line = {
                "time": time.time(),
                "kind": kill.kind,
                "slot": None,
                "moment": None,
                "step": committed,
                "node": kill.node,
            }
            with self._spec.fault_log.open("a") as log:
                log.write(json.dumps(line) + "\n")
            if kill.kind == XID:
                strikes.lose_gpu(self._spec.logs, kill.node)
            else:
                strikes.strike(self._spec.logs, kill.kind, slot=kill.slot, node=kill.node)


def explain_failure(spec: JobSpec, events: Sequence[Mapping[str, Any]]) -> str:
    """Why the job ended as it did, and the tail of the log that says it."""
    reason = next(
        (str(e["reason"]) for e in reversed(events) if e["event"] == "job_stopped"),
        "the launcher left without a reason",
    )
    path, lines = _telling_log(spec)
    return "\n".join([reason, *([f"last lines of {path}:", *(f"  {line}" for line in lines)] if path else [])])


def _telling_log(spec: JobSpec, lines_max: int = 15) -> tuple[Path | None, list[str]]:
    """A worker's traceback first, it is the nearest to the cause; then the processes around it."""
    # Also of nodes that have a launcher of their own.
    workers = sorted(spec.directory.rglob("gen*/slot*.err"), key=lambda path: path.stat().st_mtime)
    others = [*sorted(spec.directory.rglob("agent.log")), spec.logs / "coordinator.log", spec.logs / "fork-server.log"]
    for path in [*workers, *others, spec.directory / "launcher.log"]:
        if path.exists() and "Traceback" in (text := path.read_text(errors="replace")):
            return path, text.strip().splitlines()[-lines_max:]
    launcher = spec.directory / "launcher.log"
    return (
        (launcher, launcher.read_text(errors="replace").strip().splitlines()[-lines_max:])
        if launcher.exists()
        else (None, [])
    )
