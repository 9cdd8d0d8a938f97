"""Collectives among the workers of one generation, with all that can go wrong when one of them dies or is cut off.

A collective completes for each member at its own time. If a member dies before all are through, each of the others either
still gets its result or hangs, until it is aborted, notices a broken connection, or the collective's time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hotswap.sim.chronicle import ROOT, Chronicle, State
from hotswap.sim.world import World

Key = tuple[str, str, int]
"""Membership, name and step: equal for all that enter the same collective. A job that begins anew uses numbers again."""
TIMEOUT_S = 600.0
_GATES = ("gate", "last gate")


class Member(Protocol):
    """A worker, as the others see it in a collective."""

    slot: int
    slots: int
    node: str
    generation: int
    crashed: bool

    @property
    def alive(self) -> bool:
        """Whether its process is there."""

    def complete(self, key: Key, result: int) -> None:
        """The collective is through."""

    def break_off(self, key: Key) -> None:
        """A connection to a peer broke while the collective was waited for."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    member: Member
    generation: int
    state: State
    sample: int
    relied: State | None
    proposal: int


@dataclass(kw_only=True)
class _Collective:
    entries: dict[int, _Entry] = field(default_factory=dict)
    through: int = 0
    result: int = ROOT


class Fabric:
    """All collectives of a job."""

    def __init__(self, world: World, chronicle: Chronicle, open_at: Callable[[str, str], float]) -> None:
        """*chronicle* is told what meets what. *open_at*: from when on one host reaches another."""
        self._world = world
        self._chronicle = chronicle
        self._open_at = open_at
        self._open: dict[Key, _Collective] = {}
        self._dead: set[str] = set()

    def enter(
        self, key: Key, member: Member, state: State, *, sample: int, relied: State | None, proposal: int
    ) -> None:
        """A worker takes part in the collective *key*. Who passes a gate relies on the snapshot of *relied*."""
        collective = self._open.setdefault(key, _Collective())
        collective.entries[member.slot] = _Entry(
            member=member, generation=member.generation, state=state, sample=sample, relied=relied, proposal=proposal
        )
        if len(collective.entries) == member.slots:
            self._fill(key, collective)
        elif key[0] in self._dead and key[1] != "connect":
            self._break(key, member)
        self._world.after(TIMEOUT_S, member.break_off, key)

    def _fill(self, key: Key, collective: _Collective) -> None:
        """Nobody is missing: everyone gets through, each at its own time."""
        entries = collective.entries
        slots = next(iter(entries.values())).member.slots
        if key[1] in ("gradients", "gate", "materialise", "last gate"):
            self._chronicle.meet(key[1], key[0], {slot: entry.state for slot, entry in entries.items()}, slots)
        if key[1] == "gradients":
            samples = {slot: entry.sample for slot, entry in entries.items()}
            collective.result = self._chronicle.update({slot: e.state for slot, e in entries.items()}, samples)
        elif key[1] == "gate":
            collective.result = max(entry.proposal for entry in entries.values())
        for slot in sorted(entries):
            here = entries[slot].member.node
            open_at = max(self._open_at(entry.member.node, here) for entry in entries.values())
            self._world.at(open_at + self._world.between(0.0005, 0.02), self._pass, key, collective, slot)

    def _pass(self, key: Key, collective: _Collective, slot: int) -> None:
        entry = collective.entries[slot]
        if not entry.member.alive:
            return
        broken = any(other.member.crashed for other in collective.entries.values())
        if broken and self._world.chance(0.5):
            self._break(key, entry.member)
            return
        collective.through += 1
        if collective.through == len(collective.entries):
            self._open.pop(key, None)
        if key[1] in _GATES and entry.relied is not None:
            self._chronicle.gate(entry.relied.step, entry.relied.history, entry.generation)
        entry.member.complete(key, collective.result)

    def _break(self, key: Key, member: Member) -> None:
        self._world.after(self._world.between(0.0005, 0.3), member.break_off, key)

    def died(self, membership: str, slot: int) -> None:
        """A worker is gone; whoever waits for it will notice, or not."""
        self._dead.add(membership)
        for key, collective in list(self._open.items()):
            if key[0] == membership and len(collective.entries) < next(iter(collective.entries.values())).member.slots:
                for other in sorted(collective.entries):
                    if other != slot and self._world.chance(0.7):
                        self._break(key, collective.entries[other].member)
