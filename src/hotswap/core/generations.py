"""Which numbers of generations are used up, as far as this coordinator can know: none is ever given to two memberships."""

from __future__ import annotations

from hotswap.core.past import Past
from hotswap.core.types import Generation


class Generations:
    """``newest``: the highest number that is used up. ``recorded``: the newest that a record tells of."""

    def __init__(self, past: Past) -> None:
        """*past*: what the record of earlier coordinators tells."""
        self.newest = self.recorded = past.generation
        self.planned: Generation = max((generation for generation, _ in past.plans), default=0)
        """The newest of which the record tells that it was planned: it may have trained."""
        self._floor = past.floor

    def used_up(self, generation: Generation) -> None:
        """A node has accepted *generation*. If no record tells of it, there may be later ones that nobody here has heard of.

        Their members may train on somewhere, so their numbers must not be given to others.
        """
        free = self._floor if generation > self.recorded else 0
        self.newest = max(self.newest, generation, free - 1)

    def next(self) -> Generation:
        """A number for the next membership; it is used up by that."""
        self.newest += 1
        return self.newest
