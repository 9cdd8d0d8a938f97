"""The connected nodes: what they said of themselves, and what each spare stands ready for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hotswap.core import messages as m
from hotswap.core.counsel import Counsel
from hotswap.core.types import Endpoint, Generation, Membership, NodeId, Role, Slot, node_order


@dataclass(kw_only=True)
class Node:
    """One connected node. ``knows``: newest generation whose plan, and all earlier ones, it is known to have followed."""

    register: m.Register
    knows: Generation
    built: dict[Slot, m.WorkerBuilt] = field(default_factory=dict)
    lost: set[Slot] = field(default_factory=set)
    finished: set[Slot] = field(default_factory=set)


class Roster:
    """Nodes by name. Iterates in node order, so that equal inputs give equal effects."""

    def __init__(self, width: int, counsel: Counsel) -> None:
        """*width*: slots of a node. *counsel*: who gets no place, or the last."""
        self.width = width
        self._counsel = counsel
        self._nodes: dict[NodeId, Node] = {}
        self._stands_for: dict[NodeId, int] = {}
        self.leaving: dict[NodeId, float] = {}
        """Nodes that get nothing more to do, and when they go at the latest."""

    def __len__(self) -> int:
        """How many nodes are connected."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeId]:
        """Names in node order."""
        return iter(sorted(self._nodes, key=node_order))

    def __contains__(self, node: object) -> bool:
        """Whether the node is connected."""
        return node in self._nodes

    def __getitem__(self, node: NodeId) -> Node:
        """The node of that name."""
        return self._nodes[node]

    def enter(self, message: m.Register, newest: Generation) -> Node:
        """Take in a node that has registered; *newest* is the newest generation of the job."""
        # A node that never was in a generation holds nothing, so nothing it holds can be wrong.
        knows = message.generation if message.planned or message.training else message.generation - 1
        node = Node(
            register=message,
            knows=knows if message.generation else newest,
            built={built.slot: built for built in message.built},
            lost=set(message.lost),
            finished=set(message.finished),
        )
        self._nodes[message.node] = node
        return node

    def drop(self, node: NodeId) -> None:
        """Forget a node."""
        del self._nodes[node]
        self._stands_for.pop(node, None)
        self.leaving.pop(node, None)

    def leave(self, node: NodeId, until: float) -> None:
        """*node* is to leave by *until*."""
        self.leaving[node] = until
        self._stands_for.pop(node, None)

    def overdue(self, now: float) -> list[NodeId]:
        """Nodes that have to be gone."""
        return [node for node in self if now >= self.leaving.get(node, float("inf"))]

    def role(self, node: NodeId, membership: Membership | None) -> Role:
        """Member or not."""
        return Role.ACTIVE if membership is not None and node in membership.places else Role.SPARE

    def spares(self, membership: Membership | None) -> list[NodeId]:
        """Connected nodes without a place that are there to stay."""
        return [node for node in self if self.role(node, membership) is Role.SPARE and node not in self.leaving]

    def usable(self, membership: Membership | None) -> list[NodeId]:
        """Spares that may get a place, those last that keep failing."""
        fit = [node for node in self.spares(membership) if not self._counsel.excludes(node)]
        return sorted(fit, key=self._counsel.avoids)

    @property
    def domains(self) -> dict[NodeId, str]:
        """Fault domain of each node."""
        return {name: node.register.fault_domain for name, node in self._nodes.items()}

    @property
    def endpoints(self) -> dict[NodeId, Endpoint]:
        """Data port of each node."""
        return {name: self[name].register.endpoint for name in self}

    def has_built(self, node: NodeId, slots: Sequence[Slot]) -> int:
        """How many of *slots* have a built worker on *node*."""
        return sum(slot in self._nodes[node].built for slot in slots)

    def unbuilt(self, membership: Membership) -> list[NodeId]:
        """Members whose workers are not all built."""
        places = membership.places
        return [node for node in places if self.has_built(node, membership.slots_of(node)) < self.width]

    def positions(self, node: NodeId, membership: Membership) -> tuple[int, ...]:
        """Positions in the order in which a spare should build for them, none for a member or who gets no place.

        Once chosen, the first one stays: building again at every swap would leave all spares cold just when the next
        node may fail. Of several spares each stands for another position.
        """
        spares = self.usable(membership)
        if node not in spares:
            return ()
        count = len(membership.places)
        for spare in spares:
            if spare not in self._stands_for:
                self._stands_for[spare] = self._least_covered(spare, spares, membership)
        first = self._stands_for[node]
        return tuple((first + offset) % count for offset in range(count))

    def _least_covered(self, spare: NodeId, spares: list[NodeId], membership: Membership) -> int:
        covered = Counter(self._stands_for[other] for other in spares if other in self._stands_for)
        ready = {p: self.has_built(spare, membership.slots_at(p)) for p in range(len(membership.places))}
        return min(ready, key=lambda position: (-ready[position], covered[position], position))

    def prepare(self, positions: Sequence[int]) -> list[NodeId]:
        """Let a spare stand for each of *positions* as far as they go; those that have to build for another one now."""
        taken = {place: node for node, place in self._stands_for.items()}
        free = [node for node in self._stands_for if self._stands_for[node] not in positions]
        changed = []
        for position in positions:
            if position not in taken and free:
                changed.append(free.pop(0))
                self._stands_for[changed[-1]] = position
        return changed

    def fill(
        self,
        membership: Membership,
        *,
        dead: Sequence[int],
        broken: Sequence[int] = (),
        hurt: Sequence[int] = (),
        overdue: Sequence[int] = (),
    ) -> dict[int, NodeId]:
        """A spare for each dead position as far as they go, then for each whose node is *broken*.

        The ones that are built for a position go there first. For a *hurt* position, whose node is still there, only one that
        is built for it; for one that is *overdue* any that is left.
        """
        free = self.usable(membership)
        fills: dict[int, NodeId] = {}
        built = self.width
        tries = ((built, dead), (0, dead), (built, broken), (0, broken), (built, hurt), (0, overdue))
        for least, positions in tries:
            for position in positions:
                slots = membership.slots_at(position)
                able = [node for node in free if self.has_built(node, slots) >= least]
                if position not in fills and able:
                    fills[position] = max(able, key=lambda node: self.has_built(node, slots))
                    free.remove(fills[position])
        return dict(sorted(fills.items()))

    def resize(self) -> None:
        """The job has other slots from now on: nobody is built for any of them."""
        self._stands_for.clear()
        for node in self._nodes:
            self.forget_slots(node)

    def forget_slots(self, node: NodeId, hosted: Iterable[Slot] = ()) -> None:
        """What *node* has said of slots was about those of a job of another size; it has no process yet for those that are *hosted* there now."""
        known = self._nodes[node]
        known.built.clear()
        known.finished.clear()
        known.lost = set(hosted)

    def promote(self, node: NodeId) -> None:
        """A spare has become a member."""
        self._stands_for.pop(node, None)
