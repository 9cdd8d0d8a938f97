"""Which nodes go together: who keeps whose replica, and who cannot stay where others cannot reach it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hotswap.core.types import Membership, NodeId, Slot, node_order


def labels(domain: str) -> frozenset[str]:
    """The fault domains of a node: its label is one, or several with commas between (``rack=r7,switch=s2,pdu=p1``)."""
    return frozenset(part.strip() for part in domain.split(",") if part.strip())


def holders_of(
    position: int,
    places: Sequence[NodeId],
    domains: Mapping[NodeId, str],
    others: Sequence[NodeId] = (),
    replicas: int = 1,
) -> tuple[NodeId, ...]:
    """The nodes that keep the replicas of the node at *position*: *replicas* of them, or as many as there are.

    One after the other, each the member that has fewest fault domains in common with the owner, of those the one that has
    fewest in common with the holders before it, of those the next one on the ring. A node without a label shares nothing.
    *others* (spares, in order) are used when the job has a single node.
    """
    return _holders_of(position, places, _told_apart([*places, *others], domains), others, replicas)


def holders(
    membership: Membership, domains: Mapping[NodeId, str], others: Sequence[NodeId] = (), replicas: int = 1
) -> dict[Slot, tuple[NodeId, ...]]:
    """Holders of every slot that has any."""
    chosen: dict[Slot, tuple[NodeId, ...]] = {}
    parts = _told_apart([*membership.places, *others], domains)
    for position in range(len(membership.places)):
        found = _holders_of(position, membership.places, parts, others, replicas)
        if found:
            chosen.update(dict.fromkeys(membership.slots_at(position), found))
    return chosen


def _told_apart(nodes: Sequence[NodeId], domains: Mapping[NodeId, str]) -> dict[NodeId, frozenset[str]]:
    """The nodes' labels without those that all have, such as the switch at the top: they say nothing."""
    parts = {node: labels(domains.get(node, "")) for node in nodes}
    common = frozenset.intersection(*parts.values())
    return {node: own - common for node, own in parts.items()}


def _holders_of(
    position: int,
    places: Sequence[NodeId],
    parts: Mapping[NodeId, frozenset[str]],
    others: Sequence[NodeId],
    replicas: int,
) -> tuple[NodeId, ...]:
    owner, *ring = [*places[position:], *places[:position]]
    ring = ring or list(others)
    chosen: list[NodeId] = []
    while ring and len(chosen) < replicas:
        best, least = ring[0], _cost(ring[0], owner, chosen, parts)
        for node in ring:
            # Most often one of the first shares nothing: that of a thousand nodes all others are looked at is rare.
            if least == (0, 0):
                break
            cost = _cost(node, owner, chosen, parts)
            if cost < least:
                best, least = node, cost
        chosen.append(best)
        ring.remove(best)
    return tuple(chosen)


def _cost(
    node: NodeId, owner: NodeId, chosen: Sequence[NodeId], parts: Mapping[NodeId, frozenset[str]]
) -> tuple[int, int]:
    """How many domains a holder would share with the owner, and with the holders that there are."""
    return len(parts[node] & parts[owner]), sum(len(parts[node] & parts[other]) for other in chosen)


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
