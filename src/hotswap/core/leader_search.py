"""Which of several coordinators to ask next, for whoever looks for the one that leads: agents and operators' commands."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap.core import messages as m

Address = tuple[str, int]
"""Numeric host, and port."""


class LeaderSearch:
    """One after the other in turn; where one of them says who leads, that one next."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """*addresses*: at least one."""
        self.term = 0
        """The newest of which anybody has spoken who leads; 0: whoever answered may be alone."""
        self._addresses = tuple(addresses)
        self._turn = -1
        self._asked: Address | None = None
        self._hint: Address | None = None

    @property
    def several(self) -> bool:
        """Whether the one that is asked may not lead."""
        return self.term > 0 or len(self._addresses) > 1

    def next(self) -> Address:
        """Whom to ask now."""
        self._asked, self._hint = self._hint or self._another(), None
        return self._asked

    def _another(self) -> Address:
        """The next in turn; not the one that was asked last, if there are others."""
        for _ in self._addresses:
            self._turn = (self._turn + 1) % len(self._addresses)
            if self._addresses[self._turn] != self._asked:
                break
        return self._addresses[self._turn]

    def follow(self, message: m.Follow) -> None:
        """The one that was asked knows the leader. It may be wrong, or the leader out of reach, so that one is asked once."""
        if message.host and message.term >= self.term:
            self._hint = (message.host, message.port)

    def accept(self, message: m.Lead) -> bool:
        """Whether the one that was asked leads, as it says: not in a term that is over."""
        if message.term < self.term:
            return False
        self.term = message.term
        return True
