"""Who is slow: whose own part of a step takes longer than that of others who run the same program on other data.

A step takes all workers equally long, as they wait for each other. What tells them apart are the parts of it in which nobody waits
for anybody. The values compared are medians of several steps, and a worker is compared with the median of its peers: what slows
all of them down names nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hotswap.core.limits import Limits
from hotswap.core.progress import Progress
from hotswap.core.types import Generation, Slot, Step

EXCESS_S = 0.01
"""A part of a step that takes less than so much longer is worth no word, however short it is for the others."""
STEADY_STEPS = 8
"""Slow for so many steps before it is told."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """``own_s`` and ``peers_s``: seconds of *part* of a step, this worker's and the median of its peers'."""

    slot: Slot
    part: str
    own_s: float
    peers_s: float

    @property
    def ratio(self) -> float:
        """How many times as long."""
        return self.own_s / max(self.peers_s, 1e-9)


def compare(parts: Mapping[Slot, Mapping[str, float]], roles: Mapping[Slot, str], ratio: float) -> dict[Slot, Slow]:
    """The slow ones of each role, each with the part of its step in which it is slowest."""
    found: dict[Slot, Slow] = {}
    for slot, own in parts.items():
        peers = [other for other in parts if other != slot and roles.get(other, "") == roles.get(slot, "")]
        for part, own_s in own.items():
            theirs = [parts[peer][part] for peer in peers if part in parts[peer]]
            if not theirs:
                continue
            slow = Slow(slot=slot, part=part, own_s=own_s, peers_s=statistics.median(theirs))
            if slow.ratio >= ratio and own_s - slow.peers_s >= EXCESS_S:
                found[slot] = max(found.get(slot, slow), slow, key=lambda one: one.ratio)
    return found


class SlowWatch:
    """Remembers how long each worker's parts of a step take in the generation that trains."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is known yet."""
        self._limits = limits
        self._generation: Generation = 0
        self._reports: dict[Slot, Progress] = {}
        self._since: dict[Slot, Step] = {}
        self._told: set[Slot] = set()

    def saw(self, generation: Generation, reports: Mapping[Slot, Progress]) -> None:
        """News of workers; those of another generation say nothing about this one."""
        if generation != self._generation:
            self._generation = generation
            self._reports, self._since, self._told = {}, {}, set()
        self._reports.update(reports)

    def look(self, roles: Mapping[Slot, str]) -> dict[Slot, Slow]:
        """Who has been slow for long enough, of those whose *roles* are known."""
        parts = {slot: report.parts_s for slot, report in self._reports.items() if slot in roles and report.parts_s}
        slow = compare(parts, roles, self._limits.slow_ratio)
        self._since = {slot: self._since.get(slot, self._reports[slot].step) for slot in slow}
        self._told &= slow.keys()
        return {s: one for s, one in slow.items() if self._reports[s].step - self._since[s] >= STEADY_STEPS}

    def news(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of *slots* that were not told before."""
        new = [slot for slot in slots if slot not in self._told]
        self._told.update(new)
        return new
