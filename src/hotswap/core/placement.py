"""Which nodes go together: who keeps whose replica, and who cannot stay where others cannot reach it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hotswap.core.types import Membership, NodeId, Slot, node_order


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


def outcasts(unreachable: Mapping[NodeId, Collection[NodeId]], members: Collection[NodeId]) -> list[NodeId]:
    """Nodes without which all others reach each other: first who is cut off from most, of equals a spare, the later one.

    *unreachable*: for each node, to whom it could not connect. A way that is closed in one direction is closed.
    """
    left, found = set(unreachable), []
    while left:
        cut = {
            node: sum(peer in unreachable[node] or node in unreachable[peer] for peer in left - {node}) for node in left
        }
        worst = max(left, key=lambda node: (cut[node], node not in members, node_order(node)))
        if not cut[worst]:
            break
        found.append(worst)
        left.remove(worst)
    return found


def _domain(node: NodeId, domains: Mapping[NodeId, str]) -> str:
    return domains.get(node) or node
