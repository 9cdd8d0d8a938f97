"""Which nodes may be lost at the same time: every slot's state must still be somewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

from hotswap.core.placement import labels
from hotswap.core.types import Membership, NodeId, Slot


def survives(
    membership: Membership,
    holders: Mapping[Slot, Collection[NodeId]],
    lost: Collection[NodeId],
    *,
    shared: bool = False,
) -> bool:
    """Whether the newest committed step can be had from memory once *lost* are gone.

    *shared*: a replica is not all of a slot's state; the rest is only in the own snapshots of all slots.
    """
    if shared and all(node in lost for node in membership.places):
        return False
    return all(
        any(node not in lost for node in (membership.node_of(slot), *holders.get(slot, ())))
        for slot in membership.slots
    )


def fatal_losses(
    membership: Membership, holders: Mapping[Slot, Collection[NodeId]], count: int, *, shared: bool = False
) -> Iterator[tuple[NodeId, ...]]:
    """Sets of *count* members whose loss at the same time takes some slot's state away."""
    for lost in combinations(membership.places, count):
        if not survives(membership, holders, lost, shared=shared):
            yield lost


def tolerance(membership: Membership, holders: Mapping[Slot, Collection[NodeId]], *, shared: bool = False) -> int:
    """So many members may be lost at the same time, whichever they are."""
    copies = min(len({membership.node_of(slot), *holders.get(slot, ())}) for slot in membership.slots)
    return min(copies, len(membership.places)) - 1 if shared else copies - 1


def by_domain(membership: Membership, domains: Mapping[NodeId, str]) -> dict[str, tuple[NodeId, ...]]:
    """The members in each fault domain that has any."""
    found: dict[str, list[NodeId]] = {}
    for node in membership.places:
        for label in sorted(labels(domains.get(node, ""))):
            found.setdefault(label, []).append(node)
    return {label: tuple(nodes) for label, nodes in sorted(found.items())}
