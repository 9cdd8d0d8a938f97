"""Shared by the tests that talk to the coordinator directly."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator
from hotswap.core.events import FromNode
from hotswap.core.types import Endpoint

ENDPOINT = Endpoint(host="127.0.0.1", port=1)


def register(node: str, **fields: Any) -> FromNode:
    return FromNode(node=node, message=m.Register(node=node, fault_domain="", endpoint=ENDPOINT, **fields))


def dump(thing: object) -> object:
    """Everything in *thing*, to the bottom, as plain data that can be compared."""
    if isinstance(thing, dict):
        return {repr(key): dump(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [dump(item) for item in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(map(repr, thing))
    if isinstance(thing, Coordinator):
        return {name: dump(value) for name, value in vars(thing).items() if name != "_handlers"}
    if isinstance(thing, Enum) or not hasattr(thing, "__dict__"):
        return thing
    # What the last event led to is an answer, no state.
    return {name: dump(value) for name, value in vars(thing).items() if name != "out"}
