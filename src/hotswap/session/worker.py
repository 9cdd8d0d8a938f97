"""Entry point of every worker process: run the user's script as ``python script.py`` or ``python -m module`` would."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import socket
import sys
from collections.abc import Sequence

from hotswap.errors import HotswapError
from hotswap.session.settings import STACKS_SIGNAL, adopt
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec
from hotswap.wire.links import WorkerLink


def main(*entry: str) -> None:
    """Run *entry*: a script path and its arguments, or ``-m``, a module name and its arguments."""
    settings = adopt(os.environ)
    if settings is not None and settings.stacks_fd >= 0:
        # Written by the signal handler itself, so it works while the main thread is in C code and holds the interpreter.
        faulthandler.register(STACKS_SIGNAL, file=settings.stacks_fd, all_threads=True)
    try:
        _run(entry)
    except Exception as error:
        if settings is not None:
            _report(settings.link_fd, f"{type(error).__name__}: {error}"[:2000])
        raise


def _run(entry: Sequence[str]) -> None:
    if entry[0] == "-m":
        sys.argv = [entry[1], *entry[2:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(entry[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(entry)
        sys.path.insert(0, os.path.dirname(os.path.abspath(entry[0])))
        runpy.run_path(entry[0], run_name="__main__")


def _report(link_fd: int, detail: str) -> None:
    """Tell the agent why, so that the loss is reported with its cause and not just an exit code."""
    # The traceback on standard error still says it when the agent is gone.
    with contextlib.suppress(HotswapError, OSError):
        duplicate = socket.socket(fileno=os.dup(link_fd))
        WorkerLink(duplicate, worker_codec()).send(w.Failed(generation=0, detail=detail))
        duplicate.close()
