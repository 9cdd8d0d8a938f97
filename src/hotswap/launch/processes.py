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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hotswap.errors import UsageError
from hotswap.node.process import DRAIN_SIGNAL, SAFE_PATH, append_privately, die_with_parent, make_private_directory

START_S = 120.0
END_S = 10.0


@dataclass(eq=False, kw_only=True)
class Child:
    """One child. It leads a process group of its own, which is ended with it and which a terminal's signals do not reach."""

    name: str
    process: subprocess.Popen[bytes]
    _heard: bytes = b""

    @property
    def code(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def tell(self, config: Any) -> None:
        """Send *config* as one line of JSON to its standard input, which stays open: its end would mean ours."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(config) + b"\n")
            self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send *number* to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The next JSON line of its standard output, None at the time-out or at its end."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(fd, 65536)
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            return dict(json.loads(line))
        except ValueError:
            return {"error": line.decode(errors="replace")}


def start(
    name: str,
    module: str,
    *arguments: str,
    log: Path | None = None,
    answers: bool = False,
    without: Iterable[str] = (),
) -> Child:
    """Start ``python -m module arguments``; its standard error goes to *log*, or stays ours.

    ``without``: environment variables that it must not inherit. ``answers``: it says JSON lines on its standard output.
    """
    launcher = os.getpid()

    def tie() -> None:
        # Before the interpreter starts: a launcher that is killed right now must not leave it behind.
        os.setpgrp()
        # Schedulers send their notice to all processes; agents listen to it, all others must not die of it.
        signal.signal(DRAIN_SIGNAL, signal.SIG_IGN)
        die_with_parent(signal.SIGTERM, parent=launcher)

    with contextlib.ExitStack() as stack:
        err = None
        if log is not None:
            make_private_directory(log.parent)
            err = stack.enter_context(append_privately(log))
        process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else err,
            stderr=err,
            env=_environment_without(without),
            preexec_fn=tie,  # noqa: PLW1509 (the launcher has one thread)
        )
    return Child(name=name, process=process)


def _environment_without(names: Iterable[str]) -> Mapping[str, str]:
    hidden = frozenset(names)
    return {name: value for name, value in os.environ.items() if name not in hidden}


def expect(child: Child, key: str, log: Path) -> Any:
    """The value of *key* in the child's first line. UsageError with what it said if there is none."""
    message = child.hear(START_S)
    if message is not None and key in message:
        return message[key]
    detail = message.get("error", "") if message else _tail(log)
    end([child])
    raise UsageError(f"the {child.name} did not start: {detail or 'no answer in time'} (log: {log})")


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def end(children: Iterable[Child], hurry: Callable[[], bool] = lambda: False) -> None:
    """Ask politely, then insist, at once when *hurry* says so; afterwards no process of theirs is left."""
    all_children = list(children)
    for child in all_children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for child in all_children:
        while child.code is None and time.monotonic() < deadline and not hurry():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(0.1)
    for child in all_children:
        # Also when the leader has left: a member of its group may still be there.
        child.signal(signal.SIGKILL)
        child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Waker:
    """Wakes the launcher when a child ends or a signal asks it to stop. ``hurry``: it was asked more than once."""

    def __init__(self, signals: Iterable[signal.Signals], notices: Iterable[signal.Signals] = ()) -> None:
        """Take over SIGCHLD, *signals*, and *notices*: signals of which the first says only that this node has to leave soon."""
        self.asked: int | None = None
        self.hurry = False
        self.noticed = ""
        self._notices = frozenset(notices)
        self._signals = frozenset(signals)
        self._in, self._out = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self._previous_fd = signal.set_wakeup_fd(self._out, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._ask) for number in {*signals, *self._notices}}
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _ask(self, number: int, _: Any) -> None:
        # A second one of those that do not end anything by themselves says nothing new.
        if number in self._notices and (not self.noticed or number not in self._signals):
            self.noticed = signal.Signals(number).name
            return
        self.hurry = self.asked is not None
        self.asked = self.asked or number

    def wait(self, timeout_s: float) -> None:
        """Until something happens, at most *timeout_s* seconds."""
        select.select([self._in], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._in, 4096)

    def close(self) -> None:
        """Give the signals back."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._in)
        os.close(self._out)
