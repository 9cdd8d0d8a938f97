"""Waking a thread that waits for an operation which gloo has forgotten.

When a connection breaks, gloo fails the operations that have not begun. One of which some bytes are already sent or
received is left as it is: whoever waits for it sleeps until its time-out. That is likely with messages larger than the
socket buffers. This module finds the c10d ``Work`` objects that a thread is waiting for among the local variables of
its Python functions and ends them. Their results are garbage, so this is only for a process whose generation has ended:
no update passes the gate any more.

What is waited for inside C++ (DDP's reducer, functional collectives) is not found; then only ending the process helps.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FrameType
from typing import Any

from torch.distributed import Work

from hotswap.comm import native

FRAMES_MAX = 30
ITEMS_MAX = 1000
_VTABLE_HEADER_BYTES = 16


def rouse(thread_id: int, others: Iterable[Work] = ()) -> int:
    """End everything that the thread may be waiting for, and *others*; how many operations were ended."""
    end = _ender()
    if end is None:
        return 0
    works = {id(work): work for frame in _frames(thread_id) for work in _works_in(frame)}
    works.update({id(work): work for work in others if not work.is_completed()})
    for work in works.values():
        end(work)
    return len(works)


def _frames(thread_id: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread_id)
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _works_in(frame: FrameType) -> Iterator[Work]:
    """Operations in the local variables, in sequences there, and in the attributes of ``self``."""
    local = dict(frame.f_locals)
    attributes = getattr(local.get("self"), "__dict__", {})
    for value in [*local.values(), *attributes.values()]:
        if isinstance(value, Work):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value[:ITEMS_MAX] if isinstance(item, Work))


@cache
def _ender() -> Callable[[Work], None] | None:
    """A function that lets the waiters of a Work go on, or None when this torch build does not allow it."""
    work_pointer = native.pointers("c10d::Work")
    finish = native.function(
        "_ZN4c10d4Work6finishENSt15__exception_ptr13exception_ptrE", ctypes.c_void_p, ctypes.c_void_p
    )
    aborts = {}
    for name in ("SendWork", "RecvWork"):
        owner = f"4c10d16ProcessGroupGloo{len(name)}{name}"
        vtable = native.address(f"_ZTVN{owner}E")
        abort = native.function(f"_ZN{owner}5abortEv", ctypes.c_void_p)
        if vtable is not None and abort is not None:
            aborts[vtable + _VTABLE_HEADER_BYTES] = abort
    if work_pointer is None or finish is None or not aborts:
        return None
    no_exception = ctypes.create_string_buffer(ctypes.sizeof(ctypes.c_void_p))

    def end(work: Any) -> None:
        pointer = work_pointer(work)
        if pointer is None:
            return
        # Point-to-point operations wait inside gloo's buffer, all others on the Work itself.
        abort = aborts.get(ctypes.c_void_p.from_address(pointer).value or 0)
        if abort is not None:
            abort(pointer)
        else:
            finish(pointer, ctypes.addressof(no_exception))

    return end
