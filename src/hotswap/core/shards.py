"""Which durable checkpoint is complete."""

from __future__ import annotations

from collections.abc import Iterable

from hotswap.core.types import Generation, Slot, Step

INCOMPLETE_MAX = 8
"""Incomplete checkpoints remembered; one that a lost node never finished must not be kept for ever."""


class Shards:
    """For each step, the slots whose shard is on storage, and the generation that each shard was made in."""

    def __init__(self) -> None:
        """Nothing written yet."""
        self._written: dict[Step, dict[Slot, Generation]] = {}

    def add(
        self, step: Step, slot: Slot, generation: Generation, slots: Iterable[Slot]
    ) -> dict[Slot, Generation] | None:
        """All shards of *step* if that of *slot* was the last one missing."""
        written = self._written.setdefault(step, {})
        written[slot] = generation
        complete = written.keys() >= set(slots)
        if complete:
            self._written = {later: shards for later, shards in self._written.items() if later > step}
        while len(self._written) > INCOMPLETE_MAX:
            del self._written[min(self._written)]
        return written if complete else None

    def undo_after(self, step: Step) -> None:
        """Steps after *step* are done again; shards of the undone ones don't belong to them."""
        self._written = {early: shards for early, shards in self._written.items() if early <= step}
