"""What is asked of a store over TCP, and its answers: one for each request, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union, get_args

from hotswap.store.port import Entry, Put
from hotswap.wire.codec import Codec


@dataclass(frozen=True, kw_only=True)
class AskGrant:
    """Answered by Granted."""

    ttl_s: float


@dataclass(frozen=True, kw_only=True)
class AskKeep:
    """Answered by Kept."""

    lease: int


@dataclass(frozen=True, kw_only=True)
class AskRevoke:
    """Answered by Revoked."""

    lease: int


@dataclass(frozen=True, kw_only=True)
class AskGet:
    """Answered by Found."""

    key: str


@dataclass(frozen=True, kw_only=True)
class AskCommit:
    """Answered by Committed."""

    guards: dict[str, int]
    puts: tuple[Put, ...]


@dataclass(frozen=True, kw_only=True)
class Granted:
    """A new lease."""

    lease: int
    ttl_s: float


@dataclass(frozen=True, kw_only=True)
class Kept:
    """``ttl_s`` is 0.0 if the lease has ended."""

    ttl_s: float


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """The lease has ended."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """``entry`` is None if there is no such key."""

    entry: Entry | None


@dataclass(frozen=True, kw_only=True)
class Committed:
    """``revision`` is None if a guard did not hold."""

    revision: int | None


Request = Union[AskGrant, AskKeep, AskRevoke, AskGet, AskCommit]
Answer = Union[Granted, Kept, Revoked, Found, Committed]


def store_codec() -> Codec[Any]:
    """Both directions."""
    return Codec([*get_args(Request), *get_args(Answer)])
