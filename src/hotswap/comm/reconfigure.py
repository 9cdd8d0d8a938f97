"""Connecting a gloo backend anew instead of replacing it.

From torch 2.14 on, a backend that was made with ``enable_reconfigure`` has no connections until ``reconfigure`` is
called, and can be given new ones by calling it again: the object, its threads and its listener stay. Every member says
by its *handle* which of its backends it means, so the handles of all groups travel first, in one message per slot.

What stays may also be in the way: a worker thread that sits in an operation which gloo has forgotten (see ``rouse``) is
lost until that operation's time-out. A backend whose threads do not answer is therefore not used again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from hotswap.errors import UsageError

PROBE_S = 0.1
"""How long the threads of a backend may take to look at an operation."""
ALONE_S = 10.0
"""Far more than connecting a group of one takes, for there is nobody to wait for."""


def enable(options: Any) -> bool:
    """Let the backend that is made with these options wait for ``connect``; False if this torch has no such thing."""
    if not hasattr(options, "enable_reconfigure"):
        return False
    options.enable_reconfigure = True
    return True


def is_supported(backend: Any) -> bool:
    """Whether this very backend can be connected anew."""
    return bool(getattr(backend, "supports_reconfigure", False))


def handle(backend: Any) -> str:
    """How the other members call this backend the next time it is connected."""
    return str(backend.get_reconfigure_handle())


def connect(backend: Any, handles: Sequence[str], timeout_s: float) -> None:
    """Give the backend new connections; *handles* are those of all members in group-rank order. Blocks."""
    c10d: Any = torch._C._distributed_c10d
    options = c10d.ReconfigureOptions()
    options.uuid = _number_of(handles)
    options.handles = list(handles)
    options.timeout = datetime.timedelta(seconds=max(timeout_s, 0.001))
    backend.reconfigure(options).wait()


def is_free(backend: Any) -> bool:
    """Whether a thread of the backend takes up operations.

    Asked by one that gloo refuses, there being no bitwise AND of floats, but not before a thread has it in hand: nothing
    is sent, which a peer could take for part of something else.
    """
    options: Any = AllreduceOptions()
    options.reduceOp = ReduceOp.BAND
    work = backend.allreduce([torch.zeros(1)], options)
    with contextlib.suppress(RuntimeError):
        work.wait(datetime.timedelta(seconds=PROBE_S))
    return bool(work.is_completed())


def assert_effective(backend: Any) -> None:
    """Show on a group of one that connecting anew takes effect; raises UsageError if not."""
    counts = []
    for _ in range(2):
        connect(backend, [handle(backend)], ALONE_S)
        counts.append(_count(backend))
        backend.allreduce([torch.ones(1)]).wait()
        counts.append(_count(backend))
    if counts != [0, 1, 0, 1]:
        raise UsageError(
            f"with torch {torch.__version__} a reconfigured gloo backend goes on as it was; use HOTSWAP_GLOO_SWAP=rebuild"
        )


def _count(backend: Any) -> int:
    return int(backend._get_sequence_number_for_group())


def _number_of(handles: Iterable[str]) -> int:
    """A number that all members come to by themselves. A handle holds the number before, so it is a new one each time."""
    return int.from_bytes(hashlib.sha256("\n".join(handles).encode()).digest()[:7], "big")
