"""The state that slots which hold the same have agreed on last, as one agent knows it: what to go back to if they differ next.

Its versions, and those of the state that is being compared, must stay. What was being compared when a generation ended is never
concluded: keeping it as well would cost the buffer that the agreed one is in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hotswap.core.integrity import NEVER
from hotswap.core.types import Step


class Agreement:
    """``step`` is the newest that all have agreed on. A worker that is new knows less than its node, which does not forget."""

    def __init__(self, keep: Callable[[Collection[Step]], None]) -> None:
        """*keep* is told which steps to keep, whenever that changes."""
        self.step: Step = NEVER
        self._comparing: Step = NEVER
        self._keep = keep

    def comparing(self, step: Step, verified: Step) -> None:
        """A worker has begun to compare *step*; as far as it knows, all have agreed on *verified* last."""
        self._know(max(self.step, verified), max(self._comparing, step))

    def reached(self, step: Step) -> None:
        """All agree on *step*."""
        self._know(max(self.step, step), self._comparing)

    def undo_after(self, step: Step) -> None:
        """Later steps are undone; what came before is the same history."""
        self._know(min(self.step, step), NEVER)

    def forget(self) -> None:
        """What they have agreed on is in nobody's memory any more."""
        self._know(NEVER, NEVER)

    def _know(self, step: Step, comparing: Step) -> None:
        self.step, self._comparing = step, comparing if comparing > step else NEVER
        self._keep([known for known in (self.step, self._comparing) if known != NEVER])
