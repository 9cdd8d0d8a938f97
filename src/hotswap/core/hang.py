"""When nobody advances: how long that is no reason to worry, and what keeps a hang that comes back from going on for ever."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable

from hotswap.core.limits import Limits
from hotswap.core.progress import Progress, Standstill, explain
from hotswap.core.types import Slot, Step

STEPS_REMEMBERED = 20
MEDIANS = 10
"""Patience in median steps."""
PAUSES = 3
"""Patience in the longest of the pauses that have come to an end by themselves."""
WARM_UP = 5
"""How much longer the first step of a generation may take: somebody has compiled nothing yet."""


class HangWatch:
    """Watches the workers of the generation that trains; times in seconds of any monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is watched before ``begin``."""
        self._limits = limits
        self._reports: dict[Slot, Progress] = {}
        self._moved_at = 0.0
        self._committed: tuple[Step, float] | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._pauses_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._told = False
        self._seen: Counter[tuple[Slot, Step]] = Counter()

    def begin(self, now: float) -> None:
        """A generation trains: what was before says nothing."""
        self._reports.clear()
        self._committed = None
        self.rest(now)

    def rest(self, now: float) -> None:
        """Something was done about it: patience begins anew."""
        self._moved_at, self._told = now, False

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long."""
        self._moved_at = min(now, self._moved_at + seconds)

    def saw(self, slot: Slot, progress: Progress, now: float) -> None:
        """News of a worker."""
        before = self._reports.get(slot)
        if before is None or before.mark != progress.mark:
            if now - self._moved_at > self._limits.hang_floor_s / 10:
                self._pauses_s.append(now - self._moved_at)
            self.rest(now)
        self._reports[slot] = progress

    def at(self, slot: Slot) -> Progress | None:
        """The last that was heard of a worker."""
        return self._reports.get(slot)

    def committed(self, step: Step, now: float) -> None:
        """A step counts."""
        if self._committed is not None:
            before, when = self._committed
            self._steps_s.append((now - when) / (step - before))
        self._committed = (step, now)
        self._seen = Counter({key: count for key, count in self._seen.items() if key[1] >= step})

    @property
    def patience_s(self) -> float:
        """How long nobody may advance while somebody waits."""
        limits = self._limits
        patience_s = limits.hang_s
        if patience_s is None:
            median_s = statistics.median(self._steps_s) if self._steps_s else 0.0
            patience_s = max(limits.hang_floor_s, MEDIANS * median_s, PAUSES * max(self._pauses_s, default=0.0))
        if self._committed is None:
            patience_s *= WARM_UP
        return max(limits.hang_s or limits.hang_floor_s, min(patience_s, limits.hang_ceiling_s))

    def deadline(self) -> float:
        """When to look, if nobody advances before."""
        if self._limits.hang_s == 0:
            return float("inf")
        if not self._told:
            return self._moved_at + self.patience_s
        return self._moved_at + self._limits.pause_s if self._limits.pause_s else float("inf")

    def look(self, slots: Iterable[Slot], now: float) -> Standstill | None:
        """What to make of it, once for each standstill; None before it is time.

        All being busy elsewhere is told once. If it goes on beyond the limit for that, they are all culprits.
        """
        if now < self.deadline():
            return None
        slots = list(slots)
        found = explain(self._reports, slots)
        if found.waiting or not self._told:
            self._told = True
            return found
        return Standstill(culprits=tuple(slots), waiting=(), why=f"{found.why} for {now - self._moved_at:.0f} s")

    def again(self, slot: Slot, step: Step) -> int:
        """How often this was found at that step, this time included; steps before do not count."""
        self._seen[slot, step] += 1
        return self._seen[slot, step]
