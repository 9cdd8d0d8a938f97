"""What every process of a job does first, and what the kernel is asked about processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Container, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
DRAIN_SIGNAL = signal.SIGUSR1
"""To an agent or a launcher: this node is to leave. All other processes of a job ignore it, for schedulers send it to all."""
SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
"""For our own interpreters: keeps the user's folder off their path, where a file ``select.py`` would break them."""
# Loaded once, before any fork: a forked child must not have to load a library before it is tied to its parent.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel for signal *number* when the parent dies, so that nothing outlives a killed launcher (prctl(2)).

    *parent* is the process that is expected to live; a parent that is already gone then counts as well.
    """
    expected = parent or os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the request was in place.
    if os.getppid() != expected:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies; without this they go to init, where nobody ends them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Pids of this process' children, adopted and dead ones included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while we look; what it had started then belongs to another one.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def kill_orphans(known: Container[int]) -> None:
    """SIGKILL to every child that is not one of *known*: descendants of dead workers, which nobody needs any more."""
    for pid in children():
        if pid not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def make_private_directory(path: Path) -> None:
    """Create *path* and its parents, for this user alone; what exists stays as it is."""
    for directory in [*reversed(path.parents), path]:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def append_privately(path: str | Path) -> BinaryIO:
    """Open *path* for appending; a new file is for this user alone, for logs hold whatever the script prints."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def set_up_logging() -> None:
    """Plain lines with time on standard error; the launcher sends them to the process' log file."""
    level = os.environ.get("HOTSWAP_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )


def run_and_leave(coroutine: Coroutine[Any, Any, int]) -> NoReturn:
    """Run an agent to its end and leave with its exit code, whatever is still running in this process.

    ``asyncio.run`` would first wait for every task to accept its cancellation; one that does not must not keep the agent of
    a job that is over alive for ever.
    """
    code = 1
    try:
        code = asyncio.new_event_loop().run_until_complete(coroutine)
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
