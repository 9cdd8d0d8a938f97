"""Calling what torch's C++ library has and its Python bindings lack.

A C++ pointer is had by pybind11's own protocol for exchanging objects between extension modules, which checks both
the C++ type and the ABI. Everything here answers None when the torch build at hand differs, so that callers can do
without.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_TYPE_INFO_CAPSULE = ctypes.create_string_buffer(b"St9type_info")
"""Name that pybind11 asks for; a capsule does not copy its name, so this must live for ever."""
_INTERNALS_MARK = "pybind11_internals_v"
Pointers = Callable[[Any], int | None]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    except OSError:
        return None


def address(symbol: str) -> int | None:
    """Where *symbol* (a mangled name) is in memory."""
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(_library(), symbol)) if _library() else None  # type: ignore[arg-type]
    except ValueError:
        return None


def function(symbol: str, *argument_types: Any) -> Callable[..., None] | None:
    """A C++ function without result, to be called without the interpreter lock."""
    try:
        found = getattr(_library(), symbol)
    except AttributeError:
        return None
    found.argtypes = list(argument_types)
    found.restype = None
    call: Callable[..., None] = found
    return call


def pointers(class_name: str) -> Pointers | None:
    """A function from the Python object of a C++ class (``namespace::Class``) to its address, or to None if it is none."""
    type_info = address("_ZTIN" + "".join(f"{len(part)}{part}" for part in class_name.split("::")) + "E")
    abi = _pybind11_abi()
    if type_info is None or abi is None:
        return None
    capsule = _new_capsule(type_info)

    def pointer_of(instance: Any) -> int | None:
        conduit = getattr(instance, "_pybind11_conduit_v1_", None)
        pointer = conduit(abi, capsule, b"raw_pointer_ephemeral") if conduit else None
        return None if pointer is None else _capsule_pointer(pointer)

    return pointer_of


@cache
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
