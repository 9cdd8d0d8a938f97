"""What runs in a started process, whether it was forked or executed: take on the request's identity, call its target."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

from hotswap.node.process import DRAIN_SIGNAL, adopt_orphans, die_with_parent

NUMBER_OF_THREADS = "OMP_NUM_THREADS"


def call(request: dict[str, Any]) -> None:
    """Call the target."""
    # A scheduler's notice to all processes is for the agent. A script that wants it as well may say so.
    signal.signal(DRAIN_SIGNAL, signal.SIG_IGN)
    module, _, function = request["target"].partition(":")
    getattr(importlib.import_module(module), function)(*request["args"])


def run(request: dict[str, Any]) -> int:
    """Call the target in a fork; the exit code that Python itself would give, or minus the number of a signal."""
    try:
        call(request)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End a fork as an interpreter ends: non-daemon threads first, then exit handlers, then buffers."""
    try:
        for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
            try:
                finish()
            except BaseException:
                traceback.print_exc()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """In a fresh fork: group, output, environment. *fds* are those that stay open beside the standard ones."""
    join(request)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    redirect(os.devnull, os.O_RDONLY, 0)
    redirect(request["stdout_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1)
    redirect(request["stderr_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 2)
    # Open for as long as the process lives.
    stdin, stdout = open(0, closefd=False), open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = stdin, stdout, stderr  # type: ignore[misc]
    os.chdir(request["cwd"])
    # Nothing of the fork server's own environment: it may have been started for somebody else.
    os.environ.clear()
    os.environ.update(request["environ"])
    os.environ.update(zip(request["fd_names"], map(str, fds), strict=True))
    _settle_libraries()


def join(request: dict[str, Any]) -> None:
    """Enter the node's process group; adopt what this process' own children leave behind, and hand it up when it ends."""
    if request["pgid"] is not None:
        os.setpgid(0, request["pgid"])
    adopt_orphans()


def redirect(path: str, flags: int, number: int) -> None:
    """Make descriptor *number* the file at *path*."""
    target = os.open(path, flags, 0o600)
    os.dup2(target, number)
    os.close(target)


def _settle_libraries() -> None:
    """What libraries read or drew when they were imported in the fork server is set again for this process."""
    if "torch" in sys.modules:
        with contextlib.suppress(ValueError, RuntimeError):
            sys.modules["torch"].set_num_threads(int(os.environ.get(NUMBER_OF_THREADS, "1")))
    # Imported by numpy itself on first use, and then it draws its own seed.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def main() -> None:
    """Entry point of ``python -m hotswap.node.spawn_child``: the request comes on standard input."""
    request = json.loads(sys.stdin.buffer.read())
    die_with_parent(parent=request["parent"])
    join(request)
    for name in request["fd_names"]:
        os.set_inheritable(int(os.environ[name]), False)
    call(request)


if __name__ == "__main__":
    main()
