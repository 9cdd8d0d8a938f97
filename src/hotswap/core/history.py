"""Which held states belong to the surviving history, and which to a future that has been undone.

Every plan goes back to its resume step: what was newer is undone, and the same steps are done again, maybe with other
bits. A node that was not told of a plan still holds what the plan undid. It must drop that before anything it holds counts.

Agents are told all of it with every fence, and say it when they register. So a coordinator that begins without a log knows
what had been undone as soon as one agent has spoken that has accepted the newest generation.
"""

from __future__ import annotations

from collections.abc import Iterable

from hotswap.core.types import Generation, Step


class History:
    """The resume steps of past plans, as far as they can still matter."""

    def __init__(self, plans: Iterable[tuple[Generation, Step]] = ()) -> None:
        """*plans*: generation and resume step of those that are known, in any order."""
        self._plans: list[tuple[Generation, Step]] = []
        self.learn(plans)

    @property
    def plans(self) -> tuple[tuple[Generation, Step], ...]:
        """Generation and resume step of the plans that matter, oldest first."""
        return tuple(self._plans)

    def planned(self, generation: Generation, resume_step: Step) -> None:
        """Note the newest plan. Earlier ones that went back less far say nothing that this one doesn't."""
        while self._plans and self._plans[-1][1] >= resume_step:
            del self._plans[-1]
        self._plans.append((generation, resume_step))

    def learn(self, plans: Iterable[tuple[Generation, Step]]) -> None:
        """Note plans that somebody else knows of."""
        known, self._plans = self._plans, []
        for generation, step in sorted({*known, *plans}):
            self.planned(generation, step)

    def valid_to(self, knows: Generation) -> Step | None:
        """Newest step that counts on a node which has followed every plan up to generation *knows*; None: all of them."""
        # Resume steps grow along the list, so the first plan that the node missed went back furthest.
        return next((step for generation, step in self._plans if generation > knows), None)
