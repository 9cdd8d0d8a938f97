"""Tells the agent how far this worker is, from a thread of its own: the thread that trains does nothing for it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from hotswap.comm import Groups
from hotswap.core.progress import Progress
from hotswap.core.types import Generation
from hotswap.errors import PeerUnreachable
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

FRAMES = 3
"""Of the innermost frames, so many are looked at: torch wraps its own functions."""
COMMUNICATION = ("torch/distributed/", "hotswap/comm/")
PATH_PARTS = 3


class Reporter:
    """Says it with every heartbeat; more is said about a worker that has not advanced since the last time."""

    def __init__(
        self, link: WorkerLink, groups: Groups, look: Callable[[], tuple[Generation, Progress]], interval_s: float
    ) -> None:
        """*look*: generation, step and phase of this worker; operations are counted here."""
        self._link = link
        self._groups = groups
        self._look = look
        self._interval_s = interval_s
        self._last: tuple[object, ...] = ()
        self._complained: Generation = 0

    def start(self) -> None:
        """For as long as the process lives, or its agent."""
        threading.Thread(target=self._run, name="hotswap-report", daemon=True).start()

    def _run(self) -> None:
        never = threading.Event()
        with contextlib.suppress(PeerUnreachable):
            while not never.wait(self._interval_s):
                said = self.report()
                self._link.send(said)
                if said.progress.at and said.generation > self._complained and self._groups.unanswered():
                    self._complained = said.generation
                    detail = "a peer's host acknowledges nothing on a connection of this worker"
                    self._link.send(w.Trouble(generation=said.generation, detail=detail))

    def report(self) -> w.Progressed:
        """Where this worker is now."""
        generation, progress = self._look()
        issued, gate = self._groups.issued()
        progress = replace(progress, issued=issued, gate=gate)
        mark = (generation, progress.mark)
        if mark == self._last:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            progress = replace(progress, groups=self._groups.progress(), at=place(frame), waits=communicates(frame))
        self._last = mark
        return w.Progressed(generation=generation, progress=progress)


def place(frame: FrameType | None) -> str:
    """File, line and function of a frame."""
    if frame is None:
        return ""
    name = "/".join(frame.f_code.co_filename.split("/")[-PATH_PARTS:])
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"


def communicates(frame: FrameType | None) -> bool:
    """Whether the thread is inside of a function that communicates."""
    for _ in range(FRAMES):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in COMMUNICATION):
            return True
        frame = frame.f_back
    return False
