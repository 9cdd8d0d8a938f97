"""Which groups may be kept over a swap, decided from what all their members report.

A kept group must never hang and never mix up operations afterwards. That holds when every operation that one member
started was started by all of them: equal numbers of operations of the same program are the same operations, so each of
them completes on connections that nobody touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotswap.core.types import Slot


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """One member's view of one group once its main thread has parked."""

    members: tuple[Slot, ...]
    """All slots of the group, in group-rank order."""
    issued: int
    """Operations started in the group since it was formed."""
    intact: bool
    """All connections are up, none was shut by an abort, and no point-to-point traffic may be left in them."""


Reports = Mapping[Slot, Mapping[str, GroupState]]
"""Slot -> group key -> state."""


def groups_to_keep(reports: Reports, replaced: frozenset[Slot]) -> frozenset[str]:
    """Keys of the groups that every member can go on using.

    Groups with the same members are kept together or not at all: they share a listener, so the health of one is known
    only together with the others.
    """
    seen: dict[str, tuple[Slot, ...]] = {}
    for report in reports.values():
        for key, state in report.items():
            seen.setdefault(key, state.members)
    bad_members = {frozenset(members) for key, members in seen.items() if not _agreed(key, members, reports, replaced)}
    return frozenset(key for key, members in seen.items() if frozenset(members) not in bad_members)


def _agreed(key: str, members: tuple[Slot, ...], reports: Reports, replaced: frozenset[Slot]) -> bool:
    """Whether every member is still there and reports the very same healthy state, which names *key* as its group."""
    if replaced.intersection(members) or not members:
        return False
    states = [reports.get(slot, {}).get(key) for slot in members]
    first = states[0]
    if first is None or not first.intact or any(state != first for state in states):
        return False
    return all(slot in members for slot, report in reports.items() if key in report)
