"""Forming many groups at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hotswap.comm.port import GroupSpec, Meeting
from hotswap.errors import HotswapError, PeerUnreachable

STOP_POLL_S = 0.02
"""How soon a wait that can not succeed any more notices that its generation has ended."""
L = TypeVar("L")


class Formation(Generic[L]):
    """One thread per group, since every constructor waits for the peers of its group, in whatever order they come.

    A constructor can not be interrupted. When the wait is given up, its thread ends at its own deadline; this object
    holds what was formed until then, so that whoever drops it decides when the destructors run.
    """

    def __init__(self, form_one: Callable[[GroupSpec], L], specs: Sequence[GroupSpec]) -> None:
        """Start forming all groups."""
        self._form_one = form_one
        self._specs = list(specs)
        self._formed: dict[str, L] = {}
        self._errors: list[Exception] = []
        self._changed = threading.Condition()
        for spec in specs:
            threading.Thread(target=self._run, args=(spec,), name=f"hotswap-form-{spec.key}", daemon=True).start()

    def wait(self, meeting: Meeting) -> list[L]:
        """All groups, in the order of the specs. Raises PeerUnreachable or Fenced if not all could be formed."""
        with self._changed:
            while len(self._formed) < len(self._specs):
                meeting.check()
                if self._errors:
                    raise _as_fault(self._errors[0])
                if meeting.remaining_s() <= 0:
                    late = sorted({spec.key for spec in self._specs} - set(self._formed))
                    raise PeerUnreachable(f"groups {late} could not be connected in time")
                self._changed.wait(min(meeting.remaining_s(), STOP_POLL_S))
            return [self._formed[spec.key] for spec in self._specs]

    def _run(self, spec: GroupSpec) -> None:
        try:
            link = self._form_one(spec)
        except Exception as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify()
        else:
            with self._changed:
                self._formed[spec.key] = link
                self._changed.notify()


def _as_fault(error: Exception) -> HotswapError:
    if isinstance(error, HotswapError):
        return error
    fault = PeerUnreachable(f"a group could not be connected: {error}")
    fault.__cause__ = error
    return fault
