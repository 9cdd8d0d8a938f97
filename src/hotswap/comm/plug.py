"""Replacing the backend inside a ``c10d.ProcessGroup`` that stays the same object.

``ProcessGroup.setBackend`` keeps the first backend that was registered under a ``BackendType`` for ever. There are two
ways around that:

* *released*: ``ProcessGroup::release_resources()`` empties both tables, after which the usual type can be used again.
  c10d offers it in C++ only; it is called through pybind11's own protocol for handing out a C++ pointer, which checks
  the type and the ABI. Nothing of an old backend stays referenced and the number of swaps is unlimited.
* *fresh value*: every swap registers under a ``BackendType`` value that nobody used. The enumeration is a byte, so this
  ends after about 220 swaps, and the group keeps its old backends (and their threads and descriptors) alive.

The first is used when its self-test passes, else the second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hotswap.comm import native
from hotswap.errors import UsageError

FIRST_FRESH_VALUE = 32
LAST_FRESH_VALUE = 255
_RELEASE_SYMBOL = "_ZN4c10d12ProcessGroup17release_resourcesEv"


class Plug:
    """Puts backends into process groups."""

    def __init__(self, devices: Sequence[str], *, allow_release: bool = True) -> None:
        """*devices* are the device types whose collectives are routed to the plugged backend."""
        self._devices = [torch.device(name) for name in devices]
        self._release = _release_function() if allow_release else None
        self._next_value = FIRST_FRESH_VALUE

    @property
    def releases(self) -> bool:
        """Whether old backends are let go of (see the module's text)."""
        return self._release is not None

    def swaps_left(self) -> int | None:
        """How many more rounds of swaps are possible; None is unlimited."""
        return None if self.releases else LAST_FRESH_VALUE + 1 - self._next_value

    def put(self, plugged: Sequence[tuple[ProcessGroup, Any]]) -> None:
        """Put a backend into each group. No other thread may use the groups meanwhile."""
        if not plugged:
            return
        backend_type = self._next_type()
        for group, backend in plugged:
            # A group has no name of its own: c10d keeps it in the backend, and looks groups up by it.
            name, description = group.group_name, group.group_desc
            if self._release is not None:
                self._release(group)
            for device in self._devices:
                group._register_backend(device, backend_type, backend)
            group._set_group_name(name)
            group._set_group_desc(description)
            if any(group._get_backend(device) is not backend for device in self._devices):
                raise UsageError(
                    f"torch {torch.__version__} did not route group {group.group_name!r} to its new backend; "
                    "hotswap needs a torch version in which ProcessGroup._register_backend can replace one"
                )

    def _next_type(self) -> Any:
        if self.releases:
            return ProcessGroup.BackendType.CUSTOM
        if self._next_value > LAST_FRESH_VALUE:
            raise UsageError(
                f"the {LAST_FRESH_VALUE + 1 - FIRST_FRESH_VALUE} backend swaps that torch {torch.__version__} allows "
                "in one process are used up; restart the workers"
            )
        self._next_value += 1
        return ProcessGroup.BackendType(self._next_value - 1)


def _release_function() -> Callable[[Any], None] | None:
    """A function that makes a group forget its backends, or None when this torch build does not allow it."""
    release = native.function(_RELEASE_SYMBOL, ctypes.c_void_p)
    pointers = native.pointers("c10d::ProcessGroup")
    if release is None or pointers is None:
        return None

    def call(group: Any) -> None:
        pointer = pointers(group)
        if pointer is None:
            raise UsageError("pybind11 does not hand out a ProcessGroup any more; its ABI changed within this process")
        release(pointer)

    # That a pointer can not be had must not be noticed in the middle of a recovery.
    kind: Any = ProcessGroup  # torch's type stub lacks this constructor
    return call if pointers(kind(0, 1)) is not None else None
