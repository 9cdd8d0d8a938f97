"""Workers that live and do nothing: stopped by a signal (SIGSTOP, SIGTSTP, a batch system's suspend)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
STOPPED = "T"
"""As in proc(5). A debugger's ``t`` is not meant: it lasts for a moment, or somebody is looking."""


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether a signal has stopped that process."""
    try:
        # The name before it may hold anything, brackets and blanks included.
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == STOPPED
    except (OSError, IndexError):
        return False


class StoppedWorkers:
    """Notices processes that are stopped for longer than a moment."""

    def __init__(self, patience_s: float, proc: Path = PROC) -> None:
        """*patience_s*: so long a process may be stopped, in seconds."""
        self._patience_s = patience_s
        self._proc = proc
        self._since: dict[int, float] = {}

    def overdue(self, pids: Iterable[int], now: float) -> list[int]:
        """Those of *pids* that were found stopped each time for longer than that. *now* in seconds on any steady clock."""
        stopped = [pid for pid in pids if is_stopped(pid, self._proc)]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid, since in self._since.items() if now - since > self._patience_s]
