"""Who keeps whose replica: the next node of the ring that does not fail together with the owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotswap.core.types import Membership, NodeId, Slot


def holder_of(
    position: int, places: Sequence[NodeId], domains: Mapping[NodeId, str], others: Sequence[NodeId] = ()
) -> NodeId | None:
    """The node that keeps the replicas of the node at *position*, or None if no other node is left.

    The first node after it on the ring in another fault domain; a node without a label is a domain of its own. If every
    member shares the owner's domain, the nearest other member still survives the loss of one node. *others* (spares, in
    order) are used when the job has a single node.
    """
    ring = [*places[position + 1 :], *places[:position]]
    owner = _domain(places[position], domains)
    for node in ring:
        if _domain(node, domains) != owner:
            return node
    if ring:
        return ring[0]
    return others[0] if others else None


def holders(membership: Membership, domains: Mapping[NodeId, str], others: Sequence[NodeId] = ()) -> dict[Slot, NodeId]:
    """Holder of every slot that has one."""
    chosen: dict[Slot, NodeId] = {}
    for position in range(len(membership.places)):
        holder = holder_of(position, membership.places, domains, others)
        if holder is not None:
            chosen.update(dict.fromkeys(membership.slots_at(position), holder))
    return chosen


def _domain(node: NodeId, domains: Mapping[NodeId, str]) -> str:
    return domains.get(node) or node
