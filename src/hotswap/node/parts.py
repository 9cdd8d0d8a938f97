"""What an agent is made of where it touches the machine, so that the simulator can put something else in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.core.types import NodeId
from hotswap.node.check import NodeCheck
from hotswap.node.control import ControlChannel
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.reach import unreachable
from hotswap.node.witness import LastWords, Witness
from hotswap.node.workers import WorkerPool


def _last_words(node: NodeId, send: Callable[[Any], None], kernel_log: str) -> LastWords:
    return LastWords(Witness(node, Path(kernel_log)), send)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Each is called with what the agent gives it."""

    memory: Callable[..., MemoryKeeper] = MemoryKeeper
    pool: Callable[..., WorkerPool] = WorkerPool
    control: Callable[..., ControlChannel] = ControlChannel
    last_words: Callable[..., LastWords] = _last_words
    reach: Callable[..., Awaitable[tuple[NodeId, ...]]] = unreachable
    check: Callable[..., NodeCheck] = NodeCheck


REAL = Parts()
