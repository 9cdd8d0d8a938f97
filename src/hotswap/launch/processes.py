"""The processes of one launcher: started with their configuration on standard input, and ended without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from hotswap.errors import UsageError

START_S = 120.0
END_S = 10.0


@dataclass(eq=False, kw_only=True)
class Child:
    """One child; ``group``: it leads a process group of its own, which is ended with it."""

    name: str
    process: subprocess.Popen[bytes]
    group: bool = False
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send *number*, to the whole group if it leads one."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.group:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                os.kill(self.process.pid, number)

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The next JSON line of its standard output, None at the time-out or at its end."""
        out: IO[bytes] | None = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], timeout_s)[0]:
            return None
        line = out.readline()
        return dict(json.loads(line)) if line.strip() else None


def start(name: str, module: str, config: Any, log: Path, *, group: bool = False, answers: bool = False) -> Child:
    """Start ``python -m module`` with *config* as JSON on its standard input and its standard error in *log*."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else err,
            stderr=err,
            preexec_fn=os.setpgrp if group else None,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return Child(name=name, process=process, group=group)


def expect(child: Child, key: str, log: Path) -> Any:
    """The value of *key* in the child's first line. UsageError with what it said if there is none."""
    message = child.hear(START_S)
    if message is not None and key in message:
        return message[key]
    detail = message.get("error", "") if message else _tail(log)
    child.signal(signal.SIGKILL)
    raise UsageError(f"the {child.name} did not start: {detail or 'no answer in time'} (log: {log})")


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def end(children: Iterable[Child]) -> None:
    """Ask politely, then insist; afterwards no process of theirs is left."""
    waiting = list(children)
    for child in waiting:
        if child.code is None:
            child.signal(signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for child in waiting:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.01, deadline - time.monotonic()))
    for child in waiting:
        # Also when the leader has left: a member of its group may still be there.
        child.signal(signal.SIGKILL)
        child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Waker:
    """Wakes the launcher when a child ends or a signal asks it to stop."""

    def __init__(self) -> None:
        """Take over SIGCHLD, SIGINT and SIGTERM."""
        self.asked: int | None = None
        self._in, self._out = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        signal.set_wakeup_fd(self._out, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _ask(self, number: int, _: Any) -> None:
        self.asked = self.asked or number

    def wait(self, timeout_s: float) -> None:
        """Until something happens, at most *timeout_s* seconds."""
        select.select([self._in], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._in, 4096)

    def close(self) -> None:
        """Give the signals back."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._in)
        os.close(self._out)
