"""What operators' commands say to the coordinator of a running job, each on a connection of its own, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Union

from hotswap.core.types import NodeId, Slot


@dataclass(frozen=True, kw_only=True)
class Drain:
    """First message of a connection that is no agent's: let *node*, a name or an identity, leave. Answered by DrainState or Follow."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DrainState:
    """``state``: "draining", or "absent" if there is no such node (any more). ``nodes``: those that are connected."""

    state: str
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, kw_only=True)
class Inject:
    """First message of a connection as well: a drill. Answered by Follow, or by InjectState, at the latest after ``within_s`` seconds.

    ``slot``: of a worker, or -1; ``node``: a name or an identity, or empty. Which of them is needed, the fault says.
    """

    fault: str
    slot: Slot = -1
    node: str = ""
    reason: str
    within_s: float


class Outcome(str, Enum):
    """What became of an order to strike."""

    STRUCK = "struck"
    REFUSED = "refused"
    """Nothing was struck."""
    UNSURE = "unsure"
    """Whoever has to strike has not said in time that it did, and may still."""


@dataclass(frozen=True, kw_only=True)
class InjectState:
    """What was struck: ``pids`` on ``node`` (empty: the coordinator), or why nothing was, and what to do, in ``detail``."""

    outcome: Outcome
    node: NodeId = ""
    slot: Slot = -1
    pids: tuple[int, ...] = ()
    detail: str = ""


Command = Union[Drain, DrainState, Inject, InjectState]
