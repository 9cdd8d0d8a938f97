"""A store's contents as a pure object: time is an argument. Behind the memory and TCP stores, and the simulator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotswap.store.port import ABSENT, Entry, Put


@dataclass(kw_only=True)
class Lease:
    """``ends_at`` in seconds of the caller's clock."""

    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


class Table:
    """Keys, leases and the newest revision. Every method first lets go of leases that have ended by *now*."""

    def __init__(self) -> None:
        """Empty."""
        self.revision = 0
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self._last_lease = 0

    def grant(self, ttl_s: float, now: float) -> int:
        """A new lease, never the number of an earlier one."""
        self.expire(now)
        self._last_lease += 1
        self.leases[self._last_lease] = Lease(ttl_s=ttl_s, ends_at=now + ttl_s)
        return self._last_lease

    def keep(self, lease: int, now: float) -> float:
        """Seconds that it lasts from now on; 0.0 if it has ended."""
        self.expire(now)
        known = self.leases.get(lease)
        if known is None:
            return 0.0
        known.ends_at = now + known.ttl_s
        return known.ttl_s

    def revoke(self, lease: int, now: float) -> None:
        """End it."""
        self.expire(now)
        self._end(lease)

    def get(self, key: str, now: float) -> Entry | None:
        """Value and revision."""
        self.expire(now)
        return self.entries.get(key)

    def commit(self, guards: Mapping[str, int], puts: Sequence[Put], now: float) -> int | None:
        """All or nothing."""
        self.expire(now)
        if any(self._revision_of(key) != revision for key, revision in guards.items()):
            return None
        if any(put.lease and put.lease not in self.leases for put in puts):
            return None
        self.revision += 1
        for put in puts:
            for lease in self.leases.values():
                lease.keys.discard(put.key)
            if put.lease:
                self.leases[put.lease].keys.add(put.key)
            self.entries[put.key] = Entry(value=put.value, revision=self.revision)
        return self.revision

    def expire(self, now: float) -> None:
        """End what was not kept."""
        for lease in [number for number, known in self.leases.items() if known.ends_at <= now]:
            self._end(lease)

    def _revision_of(self, key: str) -> int:
        entry = self.entries.get(key)
        return entry.revision if entry is not None else ABSENT

    def _end(self, lease: int) -> None:
        known = self.leases.pop(lease, None)
        if known is not None and known.keys:
            self.revision += 1
            for key in known.keys:
                del self.entries[key]

    # --- on disk ---------------------------------------------------------------------------------------------------

    def as_saved(self) -> Saved:
        """All that has to survive a restart of the process that keeps this."""
        leases = {number: (lease.ttl_s, tuple(sorted(lease.keys))) for number, lease in self.leases.items()}
        entries = {key: (entry.value, entry.revision) for key, entry in self.entries.items()}
        return Saved(revision=self.revision, last_lease=self._last_lease, entries=entries, leases=leases)

    @classmethod
    def restored(cls, saved: Saved, now: float) -> Table:
        """Leases last anew: their owners could not keep them while there was no store, and nobody else had a chance either."""
        table = cls()
        table.revision, table._last_lease = saved.revision, saved.last_lease
        table.entries = {key: Entry(value=value, revision=at) for key, (value, at) in saved.entries.items()}
        for number, (ttl_s, keys) in saved.leases.items():
            table.leases[number] = Lease(ttl_s=ttl_s, ends_at=now + ttl_s, keys=set(keys))
        return table


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A table as it is kept on disk: values and revisions by key, times to live and keys by lease."""

    revision: int
    last_lease: int
    entries: dict[str, tuple[bytes, int]]
    leases: dict[int, tuple[float, tuple[str, ...]]]
