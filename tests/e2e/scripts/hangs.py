"""A training in which some slots hang at one step: ``hangs.py PROGRAM [options]``; HANG in the environment says how.

``kind``: one of the functions below; ``step`` and ``slots``: where; ``times``: how many processes in a row do so.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotswap.demo.loader import ExactlyOnceLoader

HANG = json.loads(os.environ["HANG"])
MARKS = Path(os.environ["TMPDIR"]).parent / "hangs"
_next_step = ExactlyOnceLoader.next_step


def lock() -> None:
    """The main thread waits for itself."""
    never = threading.Lock()
    never.acquire()
    never.acquire()


def loader() -> None:
    """Data that never comes."""
    os.read(os.pipe()[0], 1)


def native() -> None:
    """C code that does not return and keeps the interpreter."""
    while True:
        ctypes.PyDLL(None).pause()


def pause() -> None:
    """Something long that needs nobody, and comes to an end."""
    time.sleep(float(HANG["seconds"]))


def skip() -> None:
    """Leave out a collective that all others enter."""


def next_step(self: ExactlyOnceLoader) -> Any:
    if self.position == HANG["step"]:
        if int(os.environ["RANK"]) in HANG["slots"] and _may():
            globals()[HANG["kind"]]()
        elif HANG["kind"] == "skip":
            dist.all_reduce(torch.ones(1))
    return _next_step(self)


def _may() -> bool:
    """Of the processes of this slot, only the first ones."""
    MARKS.mkdir(exist_ok=True)
    before = len(list(MARKS.glob(f"{os.environ['RANK']}-*")))
    (MARKS / f"{os.environ['RANK']}-{os.getpid()}").touch()
    return before < HANG.get("times", 1)


ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
