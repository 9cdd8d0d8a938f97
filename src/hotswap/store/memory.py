"""A store inside one process, for tests and the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hotswap.store.port import Entry, Grant, Put
from hotswap.store.table import Table


class MemoryStore:
    """A client of *table*; several clients may share one."""

    def __init__(self, table: Table, clock: Callable[[], float] = time.monotonic) -> None:
        """*clock* is the store's, in seconds."""
        self._table = table
        self._clock = clock

    async def grant(self, ttl_s: float) -> Grant:
        """As the port says."""
        return Grant(lease=self._table.grant(ttl_s, self._clock()), ttl_s=ttl_s)

    async def keep(self, lease: int) -> float:
        """As the port says."""
        return self._table.keep(lease, self._clock())

    async def revoke(self, lease: int) -> None:
        """As the port says."""
        self._table.revoke(lease, self._clock())

    async def get(self, key: str) -> Entry | None:
        """As the port says."""
        return self._table.get(key, self._clock())

    async def commit(self, guards: Mapping[str, int], puts: Sequence[Put]) -> int | None:
        """As the port says."""
        return self._table.commit(guards, puts, self._clock())

    async def close(self) -> None:
        """Nothing to let go of."""
