"""The rendezvous as one node sees it: answers its workers from what it knows, and asks the coordinator once for the rest."""

from __future__ import annotations

from collections.abc import Callable

from hotswap.core.messages import KvGet, KvSet, KvValue
from hotswap.core.rendezvous import RendezvousTable
from hotswap.core.types import Generation, Slot


class RendezvousRelay:
    """Between the workers of one node and the coordinator."""

    def __init__(self, ask: Callable[[KvGet | KvSet], None], give: Callable[[Slot, KvValue], None]) -> None:
        """*ask* reaches the coordinator, *give* a worker."""
        self._table: RendezvousTable[Slot] = RendezvousTable()
        self._ask = ask
        self._give = give

    def advance(self, generation: Generation) -> None:
        """Forget what belongs to older generations."""
        self._table.advance(generation)

    def set(self, message: KvSet) -> None:
        """A worker publishes a value."""
        self.publish(message.generation, message.key, message.value)
        self._ask(message)

    def get(self, slot: Slot, message: KvGet) -> None:
        """A worker wants a value; of those that wait for the same one only the first is a question to the coordinator."""
        if message.generation != self._table.generation:
            return
        first = message.key not in self._table.waiting
        value = self._table.get(message.generation, message.key, slot)
        if value is not None:
            self._give(slot, KvValue(generation=message.generation, key=message.key, value=value))
        elif first:
            self._ask(message)

    def publish(self, generation: Generation, key: str, value: bytes) -> None:
        """A value has become known; whoever waits for it gets it."""
        for slot in self._table.set(generation, key, value):
            self._give(slot, KvValue(generation=generation, key=key, value=value))
