"""Replacing the backend inside a ``c10d.ProcessGroup`` that stays the same object.

``ProcessGroup.setBackend`` keeps the first backend that was registered under a ``BackendType`` for ever. There are two
ways around that:

* *released*: ``ProcessGroup::release_resources()`` empties both tables, after which the usual type can be used again.
  c10d offers it in C++ only; it is called through pybind11's own protocol for handing out a C++ pointer, which checks
  the type and the ABI. Nothing of an old backend stays referenced and the number of swaps is unlimited.
* *fresh value*: every swap registers under a ``BackendType`` value that nobody used. The enumeration is a byte, so this
  ends after about 220 swaps, or half as many with two backends to a group, and the group keeps its old backends (and their threads and descriptors) alive.

The first is used when its self-test passes, else the second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(self, devices: Sequence[str], *, backends_max: int = 1, allow_release: bool = True) -> None:
        """*devices* are the device types whose collectives are routed, to one of at most *backends_max* backends."""
        self._backends_max = backends_max
        self._devices = [torch.device(name) for name in devices]
        self._release = _release_function() if allow_release else None
        self._next_value = FIRST_FRESH_VALUE

    @property
    def releases(self) -> bool:
        """Whether old backends are let go of (see the module's text)."""
        return self._release is not None

    def swaps_left(self) -> int | None:
        """How many more rounds of swaps are possible; None is unlimited."""
        return None if self.releases else (LAST_FRESH_VALUE + 1 - self._next_value) // self._backends_max

    def put(self, plugged: Sequence[tuple[ProcessGroup, Mapping[str, Any]]]) -> None:
        """Put backends, by device type, into each group. No other thread may use the groups meanwhile."""
        if not plugged:
            return
        backend_types = self._next_types()
        for group, backends in plugged:
            # A group has no name of its own: c10d keeps it in the backend, and looks groups up by it.
            name, description = group.group_name, group.group_desc
            if self._release is not None:
                self._release(group)
            by_type: dict[int, Any] = {}
            for device in self._devices:
                backend = backends[device.type]
                group._register_backend(device, backend_types[by_type.setdefault(id(backend), len(by_type))], backend)
            group._set_group_name(name)
            group._set_group_desc(description)
            if any(group._get_backend(device) is not backends[device.type] for device in self._devices):
                raise UsageError(
                    f"torch {torch.__version__} did not route group {group.group_name!r} to its new backend; "
                    "hotswap needs a torch version in which ProcessGroup._register_backend can replace one"
                )

    def _next_types(self) -> Sequence[Any]:
        """One for each backend that a group may have; a second backend under the same type would not be looked at.

        The first belongs to the group's default backend, which c10d finds under this type only.
        """
        if self.releases:
            return (ProcessGroup.BackendType.CUSTOM, ProcessGroup.BackendType.GLOO)
        if self._next_value + self._backends_max - 1 > LAST_FRESH_VALUE:
            raise UsageError(
                f"the {(LAST_FRESH_VALUE + 1 - FIRST_FRESH_VALUE) // self._backends_max} backend swaps that torch {torch.__version__} allows "
                "in one process are used up; restart the workers"
            )
        self._next_value += self._backends_max
        return [ProcessGroup.BackendType(self._next_value - 1 - index) for index in range(self._backends_max)]


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
