"""One worker process as its agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

from hotswap.core.types import Generation, Slot, WorkerState
from hotswap.wire import worker_messages as w
from hotswap.wire.links import AsyncLink


@dataclass(kw_only=True, eq=False)
class WorkerProcess:
    """``fenced``: newest generation the process was told of; ``loaded``: newest whose plan it was given (0: holds no state)."""

    slot: Slot
    link: AsyncLink[Any]
    pid: int = 0
    fenced: Generation = 0
    loaded: Generation = 0
    granted: bool = False
    built: w.Built | None = None
    parked: w.Parked | None = None
    detail: str = ""
    status: int | None = None
    drained: bool = False
    unwanted: bool = False

    @property
    def alive(self) -> bool:
        """Not known to have ended."""
        return self.status is None

    def state(self) -> WorkerState | None:
        """What the parked process holds, None if it never loaded anything."""
        if self.parked is None or self.loaded == 0:
            return None
        return WorkerState(slot=self.slot, step=self.parked.step, dirty=self.parked.dirty, torn=self.parked.torn)

    def kill(self) -> None:
        """End the process now. Its exit is reported like any other."""
        if self.alive and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """How the process ended, in words."""
        if self.detail:
            return self.detail
        assert self.status is not None
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit code {self.status}"
