"""Whole jobs of real processes: what is run, how a test follows and disturbs it, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hotswap
from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.records import History, merge, read_final, read_records, resume_points
from hotswap.demo.samples import planned_ids
from hotswap.session.faults import FAULT_LOG, FAULTS, Fault

POLL_S = 0.005
GONE_S = 10.0
"""How long the last processes of a job may take to be gone: agents wait up to 5 s for the ends of their workers."""
MARK = "HOTSWAP_E2E_JOB"
SCRIPTS = Path(hotswap.__file__).parent / "demo"
Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training small enough that a whole job takes seconds. ``moments``: those its steps have."""

    name: str
    script: str
    train: TrainOptions
    nodes: int
    width: int
    moments: tuple[str, ...] = ("forward", "backward", "reduce", "optimizer", "gather", "replicate")

    @property
    def preload(self) -> str:
        """What its fork server imports."""
        return "megatron" if self.script == "train_megatron.py" else "torch"


_SMALL = {"steps": 6, "eval_every": 4, "tokens": 16, "width": 32, "layers": 2, "rows": 2, "warmup": 2}
_MEGATRON: dict[str, Any] = {**_SMALL, "layout": Layout(tp=2, pp=2, dp=2), "microbatches": 2}
MEGATRON = Program(name="megatron", script="train_megatron.py", train=TrainOptions(**_MEGATRON), nodes=2, width=4)
MEGATRON_BF16 = Program(
    name="megatron-bf16-overlap",
    script="train_megatron.py",
    train=TrainOptions(**_MEGATRON, bf16=True, overlap=True),
    nodes=2,
    width=4,
)
MEGATRON_SEQUENCE = Program(
    name="megatron-sequence-parallel",
    script="train_megatron.py",
    train=TrainOptions(**{**_MEGATRON, "layout": Layout(tp=2, dp=2)}, sequence_parallel=True),
    nodes=2,
    width=2,
)
MEGATRON_INTERLEAVED = Program(
    name="megatron-interleaved",
    script="train_megatron.py",
    train=TrainOptions(**{**_MEGATRON, "layout": Layout(pp=2), "layers": 4, "microbatches": 4}, virtual_stages=2),
    nodes=2,
    width=1,
)
FSDP2 = Program(
    name="fsdp2", script="train_fsdp2.py", train=TrainOptions(**_SMALL, layout=Layout(dp=4)), nodes=2, width=2
)
DDP = Program(
    name="ddp",
    script="train_ddp.py",
    train=TrainOptions(**_SMALL, layout=Layout(dp=3)),
    nodes=3,
    width=1,
    moments=("forward", "backward", "reduce", "optimizer", "replicate"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job. ``script`` and ``script_arguments`` replace the program's, ``environment`` is added to the launcher's."""

    program: Program
    spares: int = 1
    faults: tuple[Fault, ...] = ()
    steps: int = 0
    run_arguments: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 60.0

    @property
    def train(self) -> TrainOptions:
        """The program's options, with this cell's number of steps."""
        options = self.program.train
        return options if not self.steps else TrainOptions(**{**vars(options), "steps": self.steps})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job has left that counts."""

    exit_code: int
    events: Sequence[Event]
    deaths: Sequence[Event]
    history: History
    final: Mapping[int, Mapping[str, str]]
    console: str
    leftovers: Sequence[str]
    story: str

    def named(self, name: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if event["event"] == name]


class ForkServer:
    """One for all jobs of a test session: torch is imported once, not once per job."""

    def __init__(self, directory: Path, preload: Sequence[str]) -> None:
        self.path, self.token = str(directory / "fork.sock"), secrets.token_hex(16)
        self._log = (directory / "fork-server.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotswap.node.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        settings = {"socket": self.path, "token": self.token, "preload": list(preload)}
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer == {"ready": True}, answer
        self.descriptors = len(self._links())

    def environment(self) -> dict[str, str]:
        """By which launchers find it."""
        return {"HOTSWAP_FORK_SERVER": self.path, "HOTSWAP_FORK_SERVER_TOKEN": self.token}

    def traces(self) -> list[str]:
        """What a finished job has left in it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        links = self._links()
        found = [f"child {child} of the fork server" for child in children]
        if len(links) > self.descriptors:
            found.append(f"descriptors of the fork server: {links}")
        return found

    def _links(self) -> list[str]:
        return descriptors_of(self.process.pid)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()
        self._log.close()


class Job:
    """A running job, followed through its event log."""

    def __init__(self, cell: Cell, directory: Path, server: ForkServer | None) -> None:
        self.cell = cell
        self.directory = directory
        self.logs = directory / "job"
        self.temporary = directory / "tmp"
        self.events: list[Event] = []
        self._server = server
        self._mark = secrets.token_hex(8)
        self._offset = 0
        self._seen = 0
        self._deadline = time.monotonic() + cell.deadline_s
        self.temporary.mkdir(parents=True)
        self._console = (directory / "launcher.log").open("w+b")
        # A group of its own, as from a shell: a test may send it what Ctrl-C sends. The same session, for workers join
        # the groups of agents, and a group cannot have members from a fork server of another session.
        self.process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=self._console,
            env=self.environment(),
            preexec_fn=os.setpgrp,  # noqa: PLW1509 (pytest has one thread)
        )

    def _command(self) -> list[str]:
        cell = self.cell
        nodes = f"{cell.program.nodes}:{cell.program.nodes + cell.spares}"
        entry = cell.script or (str(SCRIPTS / cell.program.script),)
        return [
            *(sys.executable, "-m", "hotswap.cli", "run", "--standalone", "--nnodes", nodes),
            *("--nproc-per-node", str(cell.program.width), "--redirects", "3"),
            # Deaths are noticed at once all the same; silence means nothing on a machine that runs several jobs.
            *("--detection-budget-s", "30"),
            # A busy machine's replicas are late; a snapshot of each step all the same, for that is what is counted on.
            *("--overhead-limit", "0"),
            *("--log-dir", str(self.directory), "--rdzv-id", "job", *cell.run_arguments),
            *entry,
            *cell.train.to_arguments(),
            *("--out", str(self.directory)),
        ]

    def environment(self) -> dict[str, str]:
        """Of a launcher of this job."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            # Torch's cache is the user's, not the job's.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "torch-cache"),
            MARK: self._mark,
            FAULT_LOG: str(self.directory / "faults.jsonl"),
            FAULTS: json.dumps([vars(fault) for fault in self.cell.faults]),
            **self.cell.environment,
        }
        return {**environment, **self._server.environment()} if self._server is not None else environment

    # --- following -------------------------------------------------------------------------------------------------

    def wait_for(self, name: str, **fields: Any) -> Event:
        """The next event of this name, after those already waited for, whose fields are equal to *fields*."""
        while True:
            self._read()
            while self._seen < len(self.events):
                event = self.events[self._seen]
                self._seen += 1
                if event["event"] == name and all(event.get(key) == value for key, value in fields.items()):
                    return event
            if self.process.poll() is not None:
                self._read()
                if self._seen == len(self.events):
                    raise AssertionError(f"the job ended before {name} {fields}\n{self.story()}")
                continue
            self._require_time(f"{name} {fields}")
            time.sleep(POLL_S)

    def described(self) -> dict[str, Any]:
        """Where its coordinators are, and its token."""
        return dict(json.loads((self.logs / "job.json").read_text()))

    def pids(self) -> dict[str, Any]:
        """Of the coordinator and the agents."""
        return dict(json.loads((self.logs / "pids.json").read_text()))

    def worker_pids(self, node: str) -> list[int]:
        """Of a node's workers: they join the process group that their agent leads."""
        agent = self.pids()["agents"][node]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != agent:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(int(entry.name)) == agent:
                        found.append(int(entry.name))
        return sorted(found)

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        os.kill(self.pids()["coordinator"], signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """SIGKILL to all processes of a node, by its name or identity."""
        os.killpg(self.pids()["agents"][node.partition("#")[0]], signal.SIGKILL)

    def finish(self) -> Outcome:
        """Wait for the job's end and gather what it has left."""
        while self.process.poll() is None:
            self._require_time("the job's end")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        self._read()
        events = list(self.events)
        return Outcome(
            exit_code=self.process.returncode,
            events=events,
            deaths=read_lines(self.directory / "faults.jsonl"),
            history=merge(read_records(self.directory), resume_points(events), planned(self.cell.train)),
            final=read_final(self.directory),
            console=(self.directory / "launcher.log").read_text(errors="replace"),
            leftovers=self.leftovers(),
            story=self.story(),
        )

    def close(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._console.close()

    def story(self) -> str:
        """Events and the ends of the logs, for a failed assertion."""
        self._read()
        lines = [json.dumps(event)[:300] for event in self.events if event["event"] != "step_committed"]
        logs = [*sorted(self.logs.glob("*/gen*/slot*.err")), *sorted(self.logs.glob("*.log"))]
        logs += [*sorted(self.logs.glob("*/agent.log")), self.directory / "launcher.log"]
        for path in logs:
            text = path.read_text(errors="replace").strip().splitlines()[-6:] if path.exists() else []
            lines += [f"--- {path}", *text] if text else []
        return "\n".join(lines)

    def _require_time(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise AssertionError(f"no sign of {what} within {self.cell.deadline_s:g} s\n{self.story()}")

    def _read(self) -> None:
        try:
            with (self.logs / "events.jsonl").open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]

    # --- what is left ----------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Processes, files, sockets and memory of this job that are still there."""
        end = time.monotonic() + GONE_S
        while True:
            found = self._processes()
            if self._server is not None:
                found += self._server.traces()
            if not found or time.monotonic() > end:
                break
            time.sleep(0.02)
        found += [f"temporary file {path}" for path in sorted(self.temporary.rglob("*"))]
        found += [f"shared memory {path}" for path in Path("/dev/shm").glob("*hotswap*")]
        return found

    def _processes(self) -> list[str]:
        """All that inherited this job's mark. A process without processes has no sockets and no memory files either."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(f"process {entry.name}: {(entry / 'cmdline').read_text()[:100]!r}")
        return found


@contextlib.contextmanager
def running(cell: Cell, directory: Path, server: ForkServer | None) -> Iterator[Job]:
    """A job that is gone when the block is left."""
    job = Job(cell, directory, server)
    try:
        yield job
    finally:
        job.close()


def descriptors_of(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


def read_lines(path: Path) -> list[Event]:
    """JSON lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def planned(train: TrainOptions) -> dict[int, dict[int, tuple[int, ...]]]:
    """Which samples each data-parallel rank has to consume in each step."""
    shape = train.batch(train.layout.dp)
    return {
        step: {rank: tuple(planned_ids(shape, step, rank)) for rank in range(shape.dp_size)}
        for step in range(train.steps)
    }


# --- what must be true ---------------------------------------------------------------------------------------------------


def assert_clean(outcome: Outcome) -> None:
    """Nothing of the job is left, and nothing impossible happened in it."""
    assert not outcome.leftovers, outcome.leftovers
    assert not outcome.named("event_refused"), outcome.named("event_refused")
    assert not outcome.named("connection_refused"), outcome.named("connection_refused")


def assert_identical(outcome: Outcome, reference: Outcome) -> None:
    """The job ended well, and everything that it computed is bit for bit what the undisturbed job computed."""
    assert outcome.exit_code == 0, outcome.story
    assert outcome.history.faults == (), outcome.history.faults
    assert outcome.history.losses == reference.history.losses
    assert outcome.history.held_out == reference.history.held_out
    assert outcome.history.sample_ids == reference.history.sample_ids
    differing = {
        slot: [part for part in digests if digests[part] != outcome.final.get(slot, {}).get(part)]
        for slot, digests in reference.final.items()
    }
    assert not any(differing.values()), f"final state differs: {differing}"
    assert outcome.final.keys() == reference.final.keys()


def assert_recovered(outcome: Outcome, *, recoveries: int = 1) -> None:
    """Everything that was told to die died, nobody else did, and each death cost one recovery.

    Two steps at most are redone, in part: a slot may have begun with the step after the one whose update was cut short.
    """
    workers = [event for event in outcome.deaths if event["kind"] == "worker"]
    lost = outcome.named("worker_lost")
    assert sorted(event["slot"] for event in lost) == sorted(event["slot"] for event in workers), lost
    done = outcome.named("recovery_done")[1:]
    assert len(done) == recoveries, outcome.named("recovery_started")
    assert all(event["redone_steps"] <= 2 for event in done), done


Runner = Callable[[Cell], Outcome]
