"""What a diagnosis is made of: observations on one side, a verdict with its reasons on the other.

Pure data. Everything here can be made by a test, by a reader of log files, or by a running job from what it knows itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Union

Value = Union[str, int, float, bool]


class Verdict(str, Enum):
    """What a failure means for the job and its nodes."""

    TRANSIENT = "transient"
    PROCESS_FAULT = "process_fault"
    NODE_FAULT = "node_fault"
    USER_ERROR = "user_error"
    STORAGE = "storage"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    PREEMPTION = "preemption"
    NUMERICAL = "numerical"
    UNKNOWN = "unknown"


class Strength(IntEnum):
    """How directly an observation names its cause; a stronger one is preferred to a weaker one whatever their order."""

    ECHO = 0
    """Follows from something else by its nature: a time-out, a closed connection, clean-up. Never a cause."""
    CONTEXT = 1
    """Worth knowing, and a verdict only if nothing else was seen (corrected errors, bookkeeping)."""
    SYMPTOM = 2
    """Something broke here, for one of several reasons."""
    CAUSE = 3
    """The program or a library says what is wrong."""
    PROOF = 4
    """The hardware, the kernel or the scheduler says what is wrong."""


class Blames(str, Enum):
    """What kind of thing a rule points at."""

    NOBODY = "nobody"
    RANK = "rank"
    GPU = "gpu"
    PEER = "peer"
    LINK = "link"
    NODE = "node"
    STORAGE = "storage"
    CODE = "code"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One observation.

    ``kind`` is ``line`` for text nobody decoded, else the name of what was decoded (``xid``, ``exit``, ``collective_timeout`` …)
    and ``facts`` holds its fields. ``time`` is in seconds since the epoch, None if the source gave none; ``order`` orders the
    observations of one source. ``gpu`` is a PCI address where the source knows it. ``count``: equal observations in one.
    """

    kind: str = "line"
    source: str = ""
    node: str | None = None
    rank: int | None = None
    gpu: str | None = None
    time: float | None = None
    order: int = 0
    text: str = ""
    facts: Mapping[str, Value] = field(default_factory=dict)
    count: int = 1

    def fact(self, name: str) -> Value | None:
        """The field *name* of ``facts``, or None."""
        return self.facts.get(name)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Who or what is blamed; fields that the evidence does not give stay None."""

    kind: Blames
    node: str | None = None
    rank: int | None = None
    gpu: str | None = None
    peer: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        """For people: ``gpu 0000:3d:00 on node-7``."""
        parts = [self.kind.value]
        if self.kind is Blames.PEER and self.peer:
            parts.append(self.peer)
        if self.gpu:
            parts.append(self.gpu if self.kind is Blames.GPU else f"gpu {self.gpu}")
        if self.rank is not None:
            parts.append(str(self.rank) if self.kind is Blames.RANK else f"rank {self.rank}")
        if self.node:
            parts.append(self.node if self.kind is Blames.NODE else f"on {self.node}")
        if self.detail:
            parts.append(f"({self.detail})")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rule says about one observation."""

    rule: str
    verdict: Verdict
    strength: Strength
    confidence: float
    blames: Blames
    reason: str
    evidence: Evidence
    explained_by: str = ""
    """Id of the rule whose finding makes this one an echo; empty for a cause of its own."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The answer: what it is, how sure, who is to blame, and which observations decided.

    ``confidence`` is between 0 and 1; below ``CONFIDENT`` the verdict is the best guess and must not cost a node.
    """

    verdict: Verdict
    confidence: float
    culprit: Culprit
    reason: str
    rules: tuple[str, ...]
    deciding: tuple[Evidence, ...]
    echoes: tuple[Evidence, ...]
    echo_rules: tuple[str, ...] = ()
    proven: bool = False
    """Whether hardware, kernel or scheduler say so themselves, and not just what broke because of it."""
    suspects: tuple[Culprit, ...] = ()
    """Whom the blame graph and the sequence numbers point at while the cause itself is not known."""

    @property
    def confident(self) -> bool:
        """Whether the verdict may be acted upon without a check first."""
        return self.verdict is not Verdict.UNKNOWN and self.confidence >= CONFIDENT


CONFIDENT = 0.6
"""From here on a verdict is acted upon; below it, every action is the careful one."""
