"""What goes into the coordinator's state machine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Union

from hotswap.core.messages import FromAgent, ToAgent
from hotswap.core.types import NodeId, Slot

# --- in --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromNode:
    """A message of an authenticated agent."""

    node: NodeId
    message: FromAgent


@dataclass(frozen=True, kw_only=True)
class NodeGone:
    """The agent's connection ended."""

    node: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed; deadlines may be due.

    ``overslept_s``: for so long this coordinator itself did not run. What was said meanwhile is not read yet.
    """

    overslept_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """Someone who may do so ends the job."""

    exit_code: int
    reason: str


class Advice(str, Enum):
    """What a verdict asks for."""

    EXCLUDE = "exclude"
    """The host is proven broken: no place for it in this job, not now and not when it comes back."""
    AVOID = "avoid"
    """It keeps failing, unproven: where its workers are lost, a spare that is ready goes first."""
    CHECK = "check"
    """It may be to blame: let it check its health."""
    GIVE_UP = "give up"
    """What failed on the slot is the program: if it does so again without progress, the job ends."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict on what broke has come. *host* is a node's name without its incarnation; *slot* is for ``GIVE_UP``."""

    advice: Advice
    reason: str
    host: str = ""
    slot: Slot = -1


Event = Union[FromNode, NodeGone, Tick, StopAsked, Judged]

# --- out -------------------------------------------------------------------------------------------------------------

Scalar = Union[str, int, float, bool, None]
Fields = dict[str, Union[Scalar, list[Scalar], dict[str, Scalar]]]


@dataclass(frozen=True, kw_only=True)
class Send:
    """Give *message* to the agent of *node*."""

    node: NodeId
    message: ToAgent


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line for the event log."""

    event: str
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Disconnect:
    """Close the connection of a node that is no longer trusted to be alive."""

    node: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The job has ended: every agent has been told; leave with this code."""

    exit_code: int
    reason: str


Effect = Union[Send, Record, Disconnect, Exit]
