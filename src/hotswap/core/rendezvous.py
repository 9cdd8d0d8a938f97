"""The key-value space in which the process groups of one generation find each other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hotswap.core.types import Generation

Asker = TypeVar("Asker", bound=Hashable)
KEYS_MAX = 1_000_000


@dataclass(kw_only=True)
class RendezvousTable(Generic[Asker]):
    """Values of the newest generation and who waits for which. Older generations are void: nothing of them is answered."""

    generation: Generation = 0
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, dict[Asker, None]] = field(default_factory=dict)

    def advance(self, generation: Generation) -> None:
        """Begin *generation*, forgetting all older ones."""
        if generation > self.generation:
            self.generation = generation
            self.values = {}
            self.waiting = {}

    def set(self, generation: Generation, key: str, value: bytes) -> list[Asker]:
        """Publish; returns those who waited for it, in the order in which they asked."""
        if generation != self.generation:
            return []
        assert len(self.values) < KEYS_MAX, f"{len(self.values)} keys in one rendezvous"
        self.values[key] = value
        return list(self.waiting.pop(key, ()))

    def get(self, generation: Generation, key: str, asker: Asker) -> bytes | None:
        """The value; None when *asker* has to wait for it (or asked for an older generation and never gets it)."""
        if generation != self.generation:
            return None
        value = self.values.get(key)
        if value is None:
            self.waiting.setdefault(key, {})[asker] = None
        return value
