"""The port: what coordinators need of a store, and no more.

Every key has the revision at which it was last written; revisions of a store only grow. A lease ends unless it is kept, and
the keys that were written with it go with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotswap.errors import PeerFault

ABSENT = 0
"""As a revision: the key must not exist."""


class StoreUnavailable(PeerFault):
    """The store did not answer in time, or has no majority. Whether a request took effect is not known."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key's value and the revision at which it was written."""

    value: bytes
    revision: int


@dataclass(frozen=True, kw_only=True)
class Put:
    """A key to write. ``lease``: it goes when that lease ends; 0: it stays."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A new lease and how long it lasts unless it is kept, in seconds; a store may give more than was asked for."""

    lease: int
    ttl_s: float


class Store(Protocol):
    """Every call ends within the store's time-out. StoreUnavailable from any of them."""

    async def grant(self, ttl_s: float) -> Grant:
        """A new lease."""

    async def keep(self, lease: int) -> float:
        """Make a lease last anew, for so many seconds; 0.0: it has ended."""

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys. One that has ended is no error."""

    async def get(self, key: str) -> Entry | None:
        """The newest that was committed before this was asked, never an older one; None: there is no such key."""

    async def commit(self, guards: Mapping[str, int], puts: Sequence[Put]) -> int | None:
        """Write all *puts* if every key of *guards* has that revision (ABSENT: does not exist), else nothing.

        The new revision of all keys written, or None. So is a lease that has ended: then nothing is written either.
        """

    async def close(self) -> None:
        """Let go of connections. Leases go on until they end."""
