"""What runs in a started process, whether it was forked or executed: take on the request's identity, call its target."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

from hotswap.node.process import die_with_parent


def run(request: dict[str, Any]) -> int:
    """Call the target; the exit code that Python itself would give."""
    module, _, function = request["target"].partition(":")
    try:
        getattr(importlib.import_module(module), function)(*request["args"])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as an interpreter ends: non-daemon threads first, then exit handlers, then buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """In a fresh fork: group, output, environment. *fds* are those that stay open beside the standard ones."""
    if request["pgid"] is not None:
        os.setpgid(0, request["pgid"])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for path, number in ((request["stdout_path"], 1), (request["stderr_path"], 2)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, number)
        os.close(target)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    os.environ.update(zip(request["fd_names"], map(str, fds), strict=True))


def main() -> int:
    """Entry point of ``python -m hotswap.node.spawn_child``: the request comes on standard input."""
    die_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    if request["pgid"] is not None:
        os.setpgid(0, request["pgid"])
    return run(request)


if __name__ == "__main__":
    sys.exit(main())
