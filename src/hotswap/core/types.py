"""The nouns of the protocol. See docs/protocol.md for the glossary."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

Slot = int
"""A logical position in the mesh; ``rank == slot`` for the whole life of the job."""
Step = int
"""Number of optimizer updates done; state *k* is the state after *k* updates."""
Generation = int
"""Number of a committed membership; grows by one with every swap."""
NodeId = str
"""``name#incarnation``; never reused, so a node that comes back is a new node."""


def node_id(name: str, incarnation: int) -> NodeId:
    """Name of one start of one agent."""
    return f"{name}#{incarnation}"


def host_of(node: NodeId) -> str:
    """Its name: what outlives a start of its agent."""
    return node.partition("#")[0]


def node_order(node: NodeId) -> tuple[tuple[int, int | str], ...]:
    """Sort key that puts ``node10`` after ``node9``."""
    parts = re.split(r"(\d+)", node)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


NAMES_MAX = 4
"""So many nodes are named in a reason."""


def names_of(nodes: Collection[NodeId]) -> str:
    """The nodes in words, or the first few of many."""
    names = sorted(nodes, key=node_order)
    return ", ".join(names[:NAMES_MAX]) + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")


class Role(str, Enum):
    """What a node is for."""

    ACTIVE = "active"
    SPARE = "spare"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Numeric address of an agent's data port; numeric, so that nothing ever waits for a name server."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Which node has which slots in one generation.

    ``places[p]`` is the node that has slots ``p * width`` to ``(p + 1) * width - 1``.
    """

    generation: Generation
    places: tuple[NodeId, ...]
    width: int

    def __post_init__(self) -> None:
        """Assert what must hold for every membership; left on in production."""
        assert self.generation >= 1, f"generation {self.generation} < 1"
        assert self.width >= 1, f"width {self.width} < 1"
        assert len(set(self.places)) == len(self.places), f"a node has two places in {self.places}"

    @property
    def slots(self) -> range:
        """All slots of the job."""
        return range(len(self.places) * self.width)

    def node_of(self, slot: Slot) -> NodeId:
        """The node that has *slot*."""
        return self.places[slot // self.width]

    def slots_at(self, position: int) -> range:
        """The slots of the *position*-th node."""
        return range(position * self.width, (position + 1) * self.width)

    def slots_of(self, node: NodeId) -> range:
        """The slots of *node*, none if it is not a member."""
        return self.slots_at(self.places.index(node)) if node in self.places else range(0)

    def replace(self, fills: dict[int, NodeId], generation: Generation) -> Membership:
        """A later generation, with the nodes at the given positions replaced."""
        assert generation > self.generation, f"generation {generation} after {self.generation}"
        places = tuple(fills.get(position, node) for position, node in enumerate(self.places))
        return Membership(generation=generation, places=places, width=self.width)


class HeldKind(str, Enum):
    """Whose copy it is."""

    OWN = "own"
    REPLICA = "replica"


@dataclass(frozen=True, kw_only=True)
class Held:
    """One complete snapshot or replica in a node's memory."""

    slot: Slot
    step: Step
    kind: HeldKind
    shared_nbytes: int = 0
    unique_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a live, parked worker process has in its hands.

    ``step``: updates done. ``dirty``: an attempt of the next update has begun, so random state and loader have moved.
    ``torn``: an update was running, the tensors are between two steps.
    """

    slot: Slot
    step: Step
    dirty: bool
    torn: bool


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """States after ``verified`` may be wrong: *odd* slots held another state than their peers.

    What an odd slot's own node holds of it is used only where nobody else has that state.
    """

    verified: Step
    odd: tuple[Slot, ...] = ()


class SourceKind(str, Enum):
    """Where a slot's state for the resume step comes from."""

    FRESH = "fresh"
    LIVE = "live"
    OWN = "own"
    REPLICA = "replica"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Source:
    """How one slot gets its state back.

    ``unique_from``: node whose replica holds the unique section. ``shared_from``/``shared_slot``: node and slot whose own
    snapshot holds the shared section; empty when there is none. Lengths in bytes.
    """

    kind: SourceKind
    unique_from: NodeId = ""
    unique_nbytes: int = 0
    shared_from: NodeId = ""
    shared_slot: Slot = -1
    shared_nbytes: int = 0
