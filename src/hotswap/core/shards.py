"""Which durable checkpoint is complete."""

from __future__ import annotations

from collections.abc import Iterable

from hotswap.core.types import Slot, Step

INCOMPLETE_MAX = 8
"""Incomplete checkpoints remembered; one that a lost node never finished must not be kept for ever."""


class Shards:
    """Counts the slots whose shard of a step is on storage."""

    def __init__(self) -> None:
        """Nothing written yet."""
        self._written: dict[Step, set[Slot]] = {}

    def add(self, step: Step, slot: Slot, slots: Iterable[Slot]) -> bool:
        """Whether the shard of *slot* was the last that the checkpoint of *step* needed."""
        written = self._written.setdefault(step, set())
        written.add(slot)
        complete = written.issuperset(slots)
        if complete:
            self._written = {later: shards for later, shards in self._written.items() if later > step}
        while len(self._written) > INCOMPLETE_MAX:
            del self._written[min(self._written)]
        return complete

    def undo_after(self, step: Step) -> None:
        """Steps after *step* are done again; shards of the undone ones don't belong to them."""
        self._written = {early: shards for early, shards in self._written.items() if early <= step}
