"""Comparisons of state: the outcome is drawn, the protocol around it is production's.

Modelled states are right; what is simulated is that a comparison says they are not. Then no later step may count any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.core.integrity import NEVER, Vote
from hotswap.core.types import Step

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel


VOTERS = 2
"""So few cannot outvote anybody."""


class Ballots:
    """What all slots that take part in a comparison find, whichever of them asks first."""

    def __init__(self, job: JobModel, seed: int) -> None:
        """*seed* says which comparison fails, and whose state is odd; no dice are rolled for it."""
        self._job = job
        self._fails_in = 2 + seed % 5
        self._seed = seed
        self._count = 0
        self._found: dict[tuple[str, Step], tuple[Vote, Step]] = {}

    def found(self, membership: str, step: Step) -> tuple[Vote, Step]:
        """Who differs at *step*, and the newest step at which nobody did, as the slots know it."""
        if (membership, step) not in self._found:
            self._count += 1
            slots = self._job.chronicle.slots
            fails, odd = self._count == self._fails_in and slots > VOTERS, self._seed % slots
            verified = max(
                (
                    worker.comparison.verified
                    for node in self._job.living()
                    for worker in node.workers
                    if worker.membership == membership
                ),
                default=NEVER,
            )
            if fails:
                self._job.chronicle.odd = frozenset({odd})
                self._job.world.note(f"FAULT: slot {odd} differs at step {step}, all agreed at step {verified}")
            else:
                self._job.chronicle.agree(step)
            self._found[membership, step] = (Vote(odd=(odd,)) if fails else Vote(), verified)
        return self._found[membership, step]
