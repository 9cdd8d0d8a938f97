"""A real worker process, one slot of one, and the test in the place of its agent."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hotswap.core import messages as m
from hotswap.core.types import SourceKind
from hotswap.node.spawn import ForkServer, SpawnRequest
from hotswap.replication.memory import MemoryFile
from hotswap.session.settings import LINK_FD, STACKS_FD, WorkerSettings
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec
from hotswap.wire.frames import FrameReader, FrameWriter

DEADLINE_S = 30.0
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
M = TypeVar("M")


class Server:
    """A fork server that has imported the session, for all tests."""

    def __init__(self, directory: Path) -> None:
        self.path, self.token = str(directory / "fork.sock"), secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotswap.node.forkserver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        settings = {"socket": self.path, "token": self.token, "preload": ["torch", "hotswap.session.session"]}
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()
        assert json.loads(self._process.stdout.readline()) == {"ready": True}

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(DEADLINE_S)


class ScriptedAgent:
    """One worker and what its agent knows of it."""

    def __init__(self, server: Server, directory: Path, how: str, **settings: Any) -> None:
        self.directory = directory
        self._sock, theirs = socket.socketpair()
        self._codec, self._writer, self._reader = worker_codec(), FrameWriter(None), FrameReader(None)
        self._inbox: list[Any] = []
        self.passed_over: list[Any] = []
        self.memory: list[MemoryFile] = []
        self.generation = 0
        self.free = 0
        self._forks = ForkServer.connect(server.path, server.token)
        worker = replace(
            WorkerSettings(slot=0, world_size=1, link_fd=-1, trouble_s=20.0, heartbeat_s=1000.0), **settings
        )
        environment = worker.to_environment()
        del environment[LINK_FD], environment[STACKS_FD]
        self._stacks = os.memfd_create("stacks")
        request = SpawnRequest(
            target="hotswap.session.worker:main",
            args=[str(SCRIPT), how, str(directory / "log")],
            env={**environment, "HOTSWAP_FAULTS": "[]", "OMP_NUM_THREADS": "1"},
            cwd=str(directory),
            stdout_path=str(directory / "out"),
            stderr_path=str(directory / "err"),
            fd_names=[LINK_FD, STACKS_FD],
        )
        with theirs:
            self._number = self._forks.spawn(request, [theirs.fileno(), self._stacks])

    # --- the link ----------------------------------------------------------------------------------------------------

    def say(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._sock, [self._writer.frame(self._codec.encode(message))], list(fds))

    def hear(self, kind: type[M], timeout_s: float = DEADLINE_S) -> M:
        """The next message of that type; what came before it is in ``passed_over``."""
        self.passed_over = []
        message = self._next(time.monotonic() + timeout_s)
        while not isinstance(message, kind):
            self.passed_over.append(message)
            message = self._next(time.monotonic() + timeout_s)
        return message

    def silent(self, for_s: float = 0.3) -> None:
        """Nothing is said at all."""
        with contextlib.suppress(TimeoutError):
            raise AssertionError(self._next(time.monotonic() + for_s))

    def _next(self, end: float) -> Any:
        while not self._inbox:
            self._sock.settimeout(max(0.001, end - time.monotonic()))
            data = self._sock.recv(65536)
            assert data, f"the worker has ended:\n{self.errors}"
            self._inbox += [self._codec.decode(payload) for payload in self._reader.feed(data)]
        return self._inbox.pop(0)

    def leave(self) -> None:
        """The agent dies."""
        self._sock.close()

    # --- what an agent does ------------------------------------------------------------------------------------------

    def fence(self, generation: int, lost: tuple[int, ...] = ()) -> None:
        self.generation = generation
        self.say(m.Fence(generation=generation, places=("a#1",), endpoints={}, lost=lost))

    def load(self, source: SourceKind, step: int, buffer: int = -1, done: w.SnapshotDone | None = None) -> None:
        nbytes = {} if done is None else {"shared_nbytes": done.shared_nbytes, "unique_nbytes": done.unique_nbytes}
        self.say(w.Connect(generation=self.generation, keep=()))
        self.say(
            w.Load(
                generation=self.generation,
                resume_step=step,
                source=source,
                free=self.free,
                buffer=buffer,
                **nbytes,
            )
        )

    def grant(self) -> None:
        reserve = self.hear(w.Reserve)
        self.memory = [MemoryFile.create("test", reserve.nbytes) for _ in range(reserve.buffers)]
        granted = w.Granted(nbytes=reserve.nbytes, buffers=len(self.memory), free=self.free)
        self.say(granted, tuple(file.fd for file in self.memory))

    def snapshot(self, step: int) -> w.SnapshotDone:
        """Hear the snapshot of *step*; the next one goes to the other buffer."""
        done = self.hear(w.SnapshotDone)
        assert (done.step, done.generation, done.buffer) == (step, self.generation, self.free)
        self.free = (self.free + 1) % len(self.memory)
        return done

    def ack(self, step: int) -> None:
        self.say(w.Acked(generation=self.generation, step=step, free=self.free))

    def go(self) -> None:
        self.say(m.Go(generation=self.generation))

    def start(self) -> w.SnapshotDone:
        """From nothing to training in generation 1; the snapshot of step 0 is not acknowledged yet."""
        self.hear(w.Joined)
        self.fence(1)
        self.hear(w.Built)
        assert self.hear(w.Parked).generation == 1
        self.load(SourceKind.FRESH, 0)
        self.hear(w.Connected)
        self.grant()
        done = self.snapshot(0)
        assert self.hear(w.Restored) == w.Restored(generation=1, step=0)
        self.go()
        return done

    def train(self, steps: range, last: w.SnapshotDone | None = None) -> list[w.SnapshotDone]:
        """Acknowledge the snapshot each of *steps* starts from and hear the one it ends with."""
        done = [] if last is None else [last]
        for step in steps:
            self.ack(step)
            done.append(self.snapshot(step + 1))
        return done

    # --- what is left ------------------------------------------------------------------------------------------------

    def status(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit status, once it has ended."""
        end = time.monotonic() + timeout_s
        while not (ended := self._forks.poll()):
            assert time.monotonic() < end, f"still running:\n{self.errors}"
            time.sleep(0.005)
        return ended[0].status

    @property
    def log(self) -> list[dict[str, Any]]:
        path = self.directory / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def noted(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["what"] == what]

    def wait_noted(self, what: str, count: int = 1) -> None:
        end = time.monotonic() + DEADLINE_S
        while len(self.noted(what)) < count:
            assert time.monotonic() < end, f"no {what}: {self.log}\n{self.errors}"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        self._forks.kill(self._number, number)

    @property
    def stacks(self) -> str:
        return os.pread(self._stacks, 1 << 20, 0).decode()

    @property
    def errors(self) -> str:
        path = self.directory / "err"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        self._forks.close()
        os.close(self._stacks)
        self._sock.close()
        for file in self.memory:
            file.close()


@contextlib.contextmanager
def worker(server: Server, directory: Path, how: str = "well", **settings: Any) -> Iterator[ScriptedAgent]:
    made = ScriptedAgent(server, directory, how, **settings)
    try:
        yield made
    finally:
        made.close()


def touch(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
