"""Entry point of every worker process: run the user's script as ``python script.py`` or ``python -m module`` would."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence

from hotswap.errors import HotswapError
from hotswap.session.settings import PREFIX
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec
from hotswap.wire.links import WorkerLink


def main(*entry: str) -> None:
    """Run *entry*: a script path and its arguments, or ``-m``, a module name and its arguments."""
    try:
        _run(entry)
    except Exception as error:
        _report(f"{type(error).__name__}: {error}"[:2000])
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


def _report(detail: str) -> None:
    """Tell the agent why, so that the loss is reported with its cause and not just an exit code."""
    try:
        duplicate = socket.socket(fileno=os.dup(int(os.environ[PREFIX + "LINK_FD"])))
        WorkerLink(duplicate, worker_codec()).send(w.Failed(generation=0, detail=detail))
        duplicate.close()
    except (HotswapError, OSError, KeyError):
        # The traceback on standard error still says it.
        pass
