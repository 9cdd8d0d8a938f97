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
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hotswap.errors import UsageError

FIRST_FRESH_VALUE = 32
LAST_FRESH_VALUE = 255
_RELEASE_SYMBOL = "_ZN4c10d12ProcessGroup17release_resourcesEv"
_TYPE_INFO_SYMBOL = "_ZTIN4c10d12ProcessGroupE"
_TYPE_INFO_CAPSULE = ctypes.create_string_buffer(b"St9type_info")
"""Name that pybind11 asks for; a capsule does not copy its name, so this must live for ever."""
_INTERNALS_MARK = "pybind11_internals_v"


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
    abi = _pybind11_abi()
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        release = getattr(library, _RELEASE_SYMBOL)
        type_info = ctypes.addressof(ctypes.c_char.in_dll(library, _TYPE_INFO_SYMBOL))
    except (OSError, AttributeError, ValueError):
        return None
    kind: Any = ProcessGroup  # torch's type stub lacks what is used here
    if abi is None or not hasattr(kind, "_pybind11_conduit_v1_"):
        return None
    release.argtypes = [ctypes.c_void_p]
    release.restype = None
    capsule = _new_capsule(type_info)

    def call(group: Any) -> None:
        pointer = group._pybind11_conduit_v1_(abi, capsule, b"raw_pointer_ephemeral")
        if pointer is None:
            raise UsageError("pybind11 refused to hand out a ProcessGroup; its ABI changed within this process")
        release(_capsule_pointer(pointer))

    # A pointer that cannot be had must not be noticed in the middle of a recovery.
    return call if kind(0, 1)._pybind11_conduit_v1_(abi, capsule, b"raw_pointer_ephemeral") is not None else None


def _pybind11_abi() -> bytes | None:
    """The ABI name that torch's copy of pybind11 was built with; found in the key under which it keeps its state."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    # A borrowed reference: py_object as the result type would drop one that is not ours.
    borrowed = api.PyInterpreterState_GetDict(api.PyInterpreterState_Get())
    state = ctypes.cast(borrowed, ctypes.py_object).value if borrowed else {}
    for key in state:
        if isinstance(key, str) and _INTERNALS_MARK in key:
            return key.split(_INTERNALS_MARK)[1].split("_", 1)[1].strip("_").encode()
    return None


def _new_capsule(pointer: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return new(pointer, ctypes.addressof(_TYPE_INFO_CAPSULE), None)


def _capsule_pointer(capsule: Any) -> int:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_void_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_void_p]
    return int(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))
