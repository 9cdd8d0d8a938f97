"""Which held states belong to the surviving history, and which to a future that has been undone.

Every plan goes back to its resume step: what was newer is undone, and the same steps are done again, maybe with other
bits. A node that was not told of a plan still holds what the plan undid. It must drop that before anything it holds counts.
"""

from __future__ import annotations

from hotswap.core.types import Generation, Step

NOTHING: Step = -1
"""Below every step: nothing that is held counts."""


class History:
    """The resume steps of past plans, as far as they can still matter."""

    def __init__(self, since: Generation = 0) -> None:
        """*since*: the newest generation of which nothing is known; above 0 after a restart of the coordinator."""
        self.since = since
        self._plans: list[tuple[Generation, Step]] = []

    def planned(self, generation: Generation, resume_step: Step) -> None:
        """Note a plan. Earlier ones that went back less far say nothing that this one doesn't."""
        while self._plans and self._plans[-1][1] >= resume_step:
            del self._plans[-1]
        self._plans.append((generation, resume_step))

    def valid_to(self, knows: Generation) -> Step | None:
        """Newest step that counts on a node which has followed every plan up to generation *knows*; None: all of them."""
        if knows < self.since:
            return NOTHING
        # Resume steps grow along the list, so the first plan that the node missed went back furthest.
        return next((step for generation, step in self._plans if generation > knows), None)
