"""Coordinators and a store in processes of their own, beside a job that is followed as any other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from e2e_harness import DDP, SCRIPTS, Cell, Job, Program

from hotswap.chaos.hosts import token_file
from hotswap.demo.options import Layout, TrainOptions

START_S = 30.0
LEASE_S = 4.0
"""Long for a machine that is not busy, short for one that runs several jobs."""
TWO = Program(
    name="ddp-two-nodes",
    script=DDP.script,
    train=TrainOptions(layout=Layout(dp=2), steps=80, eval_every=20, tokens=16, width=32, layers=1, rows=2, warmup=2),
    nodes=2,
    width=1,
)


def paced(steps: int = TWO.train.steps, step_s: float = 0.12) -> Cell:
    """A job that lasts, in which nothing takes long."""
    script = (str(Path(__file__).parent / "scripts" / "paced.py"), str(step_s), str(SCRIPTS / TWO.script))
    return Cell(program=TWO, steps=steps, script=script, deadline_s=150.0)


class Server:
    """A process that says at which port it listens. *prefix*: what its command begins with (a network namespace)."""

    def __init__(self, name: str, command: Sequence[str], log: Path, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self.log = log
        self._command = [*prefix, sys.executable, "-m", "hotswap.cli", *command]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], START_S)[0]
        line = self.process.stdout.readline() if ready else b""
        assert line, f"{self.name} did not start\n{self.tail()}"
        self.port = int(json.loads(line)["port"])

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = START_S) -> int:
        code = self.process.wait(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def tail(self) -> str:
        return f"--- {self.log}\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def store(directory: Path, port: int = 0, prefix: Sequence[str] = (), host: str = "127.0.0.1") -> Server:
    """``hotswap store``."""
    command = ["store", "--listen", f"{host}:{port}", "--file", str(directory / "store.json")]
    return Server("store", [*command, "--token-file", token_file(directory)], directory / "store.log", prefix)


def coordinator(
    name: str,
    directory: Path,
    cell: Cell,
    url: str,
    prefix: Sequence[str] = (),
    listen: str = "127.0.0.1:0",
    budget_s: str = "30",
) -> Server:
    """``hotswap coordinator``, for a job with that cell's nodes; its events go to the job's own log."""
    nodes = f"{cell.program.nodes}:{cell.program.nodes + cell.spares}"
    command = [
        *("coordinator", "--nnodes", nodes, "--nproc-per-node", str(cell.program.width), "--rdzv-id", "job"),
        *("--listen", listen, "--log-dir", str(directory), "--token-file", token_file(directory)),
        *("--detection-budget-s", budget_s, "--lease-s", str(LEASE_S), "--store", url),
    ]
    return Server(name, command, directory / f"{name}.log", prefix)


class ControlPlane:
    """Several coordinators and what they share."""

    def __init__(self, directory: Path, cell: Cell, url: str = "", count: int = 2) -> None:
        self.store = store(directory) if not url else None
        self.url = url or f"tcp://127.0.0.1:{self.store.port if self.store is not None else 0}"
        self.servers = [coordinator(f"coordinator{n}", directory, cell, self.url) for n in range(count)]
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        flags = ("--coordinator", addresses, "--token-file", token_file(directory), "--lease-s", str(LEASE_S))
        self.cell = replace(cell, run_arguments=(*cell.run_arguments, *flags))

    def leading(self, job: Job) -> Server:
        """The coordinator that said last that it leads."""
        pid = [event["pid"] for event in job.events if event["event"] == "coordinator_started"][-1]
        return next(server for server in self.servers if server.process.pid == pid)

    def story(self) -> str:
        servers = [*self.servers, *([self.store] if self.store is not None else [])]
        return "\n".join(server.tail() for server in servers)

    def close(self) -> None:
        for server in [*self.servers, *([self.store] if self.store is not None else [])]:
            if server.process.poll() is None:
                server.signal(signal.SIGCONT)
            server.close()


@contextmanager
def control_plane(directory: Path, cell: Cell, url: str = "") -> Iterator[ControlPlane]:
    made = ControlPlane(directory, cell, url)
    try:
        yield made
    finally:
        made.close()


def wait_until_ended(server: Server, within_s: float) -> int:
    """How it ended by itself."""
    end = time.monotonic() + within_s
    while server.process.poll() is None:
        assert time.monotonic() < end, f"{server.name} goes on\n{server.tail()}"
        time.sleep(0.02)
    return server.wait()
