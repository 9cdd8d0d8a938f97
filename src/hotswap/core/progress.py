"""How far workers are, and who keeps whom from advancing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hotswap.core.types import Slot, Step

MUTE_S = 5.0
"""After so long without a word of a living process its main thread holds the interpreter, or waits for the kernel."""


@dataclass(frozen=True, kw_only=True)
class GroupProgress:
    """One worker in one group of which operations can be counted: *issued* of them were started."""

    members: tuple[Slot, ...]
    issued: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One worker, as it saw itself a moment ago.

    ``phase``: what its session is at. ``issued``: operations started in all groups together, ``gate`` those of the commit
    gate. The rest says more about one that stands still, and is left out of others: ``waits`` if its main thread is inside
    of communication, ``at`` where that thread is, ``groups`` by their keys. ``mute_s``: time since it has said this. ``parts_s``: how
    long those parts of a step take in which it waits for nobody (medians; see session.tempo).
    """

    step: Step
    phase: str
    issued: int
    gate: int
    waits: bool = False
    at: str = ""
    groups: dict[str, GroupProgress] = field(default_factory=dict)
    mute_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def mark(self) -> tuple[Step, str, int, int]:
        """Changes whenever the worker advances."""
        return self.step, self.phase, self.issued, self.gate

    @property
    def mute(self) -> bool:
        """Too long silent for a process that only waits."""
        return self.mute_s > MUTE_S


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Why nobody advances. ``culprits``: who is waited for; nobody, if that cannot be said. ``why``: in words.

    ``waiting``: who is kept from advancing; nobody, if all are busy with something else than communication.
    """

    culprits: tuple[Slot, ...]
    waiting: tuple[Slot, ...]
    why: str


def explain(reports: Mapping[Slot, Progress], slots: Iterable[Slot]) -> Standstill:
    """Who of *slots*, none of which advances, keeps the others waiting.

    Whoever has started fewer operations in a group than another member is waited for, or will be. That chain ends at
    those who wait for nobody. What only the commit gate shows counts last: everybody is late there because of one.
    """
    slots = list(slots)
    inside = {slot for slot in slots if slot in reports and reports[slot].waits and not reports[slot].mute}
    late = _late_in_groups(reports, slots) or _late_at_the_gate(reports, slots)
    blamed = {slot for found in late for slot in found.missing}
    waiting = {slot for found in late for slot in found.there} | inside
    ends = {slot for slot in blamed if not any(slot in found.there for found in late)} or blamed
    suspects = ends or (set(slots) - inside if inside else set())
    culprits = (suspects - inside) or _most_blamed(suspects, late)
    if not waiting:
        return Standstill(culprits=(), waiting=(), why="all workers are busy outside of collectives")
    if not culprits:
        why = f"{_named(waiting)} wait for each other"
        return Standstill(culprits=(), waiting=tuple(sorted(waiting)), why=why)
    return Standstill(
        culprits=tuple(sorted(culprits)),
        waiting=tuple(sorted(waiting - culprits)),
        why=_why(culprits, late, waiting - culprits),
    )


@dataclass(frozen=True, kw_only=True)
class _Late:
    """Operation number *operation* of *group*: some have entered it, and maybe later ones, others have not."""

    group: str
    operation: int
    there: frozenset[Slot]
    missing: frozenset[Slot]


def _late_in_groups(reports: Mapping[Slot, Progress], slots: list[Slot]) -> list[_Late]:
    members = {key: group.members for slot in slots if slot in reports for key, group in reports[slot].groups.items()}
    found = []
    for key in sorted(members):
        issued = {
            slot: reports[slot].groups[key].issued if slot in reports and key in reports[slot].groups else -1
            for slot in members[key]
            if slot in slots
        }
        found += _late(key, issued)
    return found


def _late_at_the_gate(reports: Mapping[Slot, Progress], slots: list[Slot]) -> list[_Late]:
    return _late("the commit gate", {slot: reports[slot].gate if slot in reports else -1 for slot in slots})


def _late(group: str, issued: Mapping[Slot, int]) -> list[_Late]:
    least = min(issued.values(), default=0)
    missing = frozenset(slot for slot, count in issued.items() if count == least)
    there = frozenset(issued) - missing
    return [_Late(group=group, operation=max(least, 0) + 1, there=there, missing=missing)] if there else []


def _most_blamed(suspects: set[Slot], late: list[_Late]) -> set[Slot]:
    """In a circle: those that more others wait for than for the rest of it. Nobody if all are blamed alike."""
    blame = {
        slot: len(frozenset[Slot]().union(*(found.there for found in late if slot in found.missing)))
        for slot in suspects
    }
    most = max(blame.values(), default=0)
    found = {slot for slot, count in blame.items() if count == most}
    return found if len(found) < len(suspects) or len(suspects) == 1 else set()


def _why(culprits: set[Slot], late: list[_Late], waiting: set[Slot]) -> str:
    for found in late:
        missing = culprits & found.missing
        if missing:
            has = "has" if len(missing) == 1 else "have"
            return (
                f"{_named(missing)} {has} not entered operation {found.operation} of {found.group}, "
                f"in which {_named(found.there)} wait{'s' if len(found.there) == 1 else ''}"
            )
    verb = "is" if len(culprits) == 1 else "are"
    return f"{_named(culprits)} {verb} outside of communication, in which {_named(waiting)} wait"


def _named(slots: Iterable[Slot]) -> str:
    numbers = sorted(slots)
    text = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"slot{'s' if len(numbers) > 1 else ''} {text}"
