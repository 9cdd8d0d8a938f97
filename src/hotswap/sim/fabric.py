"""Collectives among the workers of one generation, with all that can go wrong when one of them dies.

A collective completes for each member at its own time. If a member dies before all are through, each of the others either
still gets its result or hangs, until it is aborted or notices a broken connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hotswap.sim.chronicle import ROOT, Chronicle, State
from hotswap.sim.world import World

Key = tuple[int, str, int]
"""Generation, name and step: equal for all that enter the same collective."""


class Member(Protocol):
    """A worker, as the others see it in a collective."""

    slot: int
    alive: bool
    crashed: bool

    def complete(self, key: Key, history: int) -> None:
        """The collective is through."""

    def break_off(self, key: Key) -> None:
        """A connection to a peer broke while the collective was waited for."""


@dataclass(kw_only=True)
class _Collective:
    members: dict[int, Member] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    through: set[int] = field(default_factory=set)
    on_full: Callable[[], None] | None = None


class Fabric:
    """All collectives of a job."""

    def __init__(self, world: World, chronicle: Chronicle) -> None:
        """*chronicle* is told what meets what."""
        self._world = world
        self._chronicle = chronicle
        self._open: dict[Key, _Collective] = {}
        self._dead: set[int] = set()
        self._histories: dict[Key, int] = {}

    def enter(self, key: Key, member: Member, state: State, sample: int) -> None:
        """A worker takes part in the collective *key*."""
        collective = self._open.setdefault(key, _Collective())
        slot = member.slot
        collective.members[slot], collective.states[slot], collective.samples[slot] = member, state, sample
        if len(collective.members) == self._chronicle.slots:
            self._fill(key, collective)
        elif key[0] in self._dead and key[1] != "connect":
            self._break(key, member)

    def _fill(self, key: Key, collective: _Collective) -> None:
        """Nobody is missing: everyone gets through, each at its own time."""
        if key[1] in ("gradients", "gate", "materialise", "last gate"):
            self._chronicle.meet(key[1], key[0], collective.states)
        if key[1] == "gradients":
            self._histories[key] = self._chronicle.update(collective.states, collective.samples)
        for slot in sorted(collective.members):
            self._world.after(self._world.between(0.0005, 0.02), self._pass, key, collective, slot)

    def _pass(self, key: Key, collective: _Collective, slot: int) -> None:
        member = collective.members[slot]
        broken = any(other.crashed for other in collective.members.values())
        if not member.alive:
            return
        if broken and self._world.chance(0.5):
            self._break(key, member)
            return
        collective.through.add(slot)
        if len(collective.through) == len(collective.members):
            self._open.pop(key, None)
        if key[1] in ("gate", "last gate"):
            state = collective.states[slot]
            self._chronicle.gate(state.step, state.history)
        member.complete(key, self._histories.get(key, ROOT))

    def _break(self, key: Key, member: Member) -> None:
        self._world.after(self._world.between(0.0005, 0.3), member.break_off, key)

    def died(self, generation: int, slot: int) -> None:
        """A worker is gone; whoever waits for it will notice, or not."""
        self._dead.add(generation)
        for key, collective in list(self._open.items()):
            if key[0] == generation and len(collective.members) < self._chronicle.slots:
                for other in sorted(collective.members):
                    if other != slot and self._world.chance(0.7):
                        self._break(key, collective.members[other])
