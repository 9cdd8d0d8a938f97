"""Silent corruption: whose state differs from that of those who should hold the same, and what is done about it.

What may be wrong since the last comparison that agreed is not only the state that differs: through gradients the damage has
reached all others. So a job goes back to the state that was compared and found equal, on every slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotswap.core.messages import StateCompared
from hotswap.core.types import Generation, NodeId, Slot, Step

NEVER: Step = -1
"""Before the first comparison that agreed."""
TIMES_MAX = 3
"""So often the same slot may differ after the same verified state: then it is the program that makes it differ."""
ON_A_NODE = 2
"""So often a node's slots may differ before another node is tried."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """``odd``: slots that differ from most of their peers. ``undecided``: slots of which no majority says who is right."""

    odd: tuple[Slot, ...] = ()
    undecided: tuple[Slot, ...] = ()

    @property
    def agreed(self) -> bool:
        """Whether nobody differs."""
        return not self.odd and not self.undecided


def vote(ballots: Mapping[Slot, Iterable[tuple[int, int]]]) -> Vote:
    """Each slot's ballot says, for every group whose members hold the same, which group that is and what it holds."""
    groups: dict[int, dict[Slot, int]] = {}
    for slot, ballot in ballots.items():
        for group, value in ballot:
            groups.setdefault(group, {})[slot] = value
    odd: set[Slot] = set()
    undecided: set[Slot] = set()
    for held in groups.values():
        value, count = Counter(held.values()).most_common(1)[0]
        if count == len(held):
            continue
        if 2 * count > len(held):
            odd.update(slot for slot, found in held.items() if found != value)
        else:
            undecided.update(held)
    return Vote(odd=tuple(sorted(odd)), undecided=tuple(sorted(undecided)))


class Offenders:
    """Who has differed so far."""

    def __init__(self) -> None:
        """Nobody."""
        self._heard: Generation = 0
        self._times: Counter[tuple[Slot, Step]] = Counter()
        self._nodes: Counter[NodeId] = Counter()

    def news(self, message: StateCompared) -> bool:
        """Whether nothing was heard of this yet: all slots tell it, and again until something is done."""
        new = message.generation > self._heard
        self._heard = max(self._heard, message.generation)
        return new

    def again(self, slots: Sequence[Slot], verified: Step) -> int:
        """How often one of *slots* has differed after that verified state, this time included."""
        self._times.update((slot, verified) for slot in slots)
        return max(self._times[slot, verified] for slot in slots)

    def blame(self, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Nodes that have had their last chance with this."""
        nodes = sorted(nodes)
        self._nodes.update(nodes)
        return [node for node in nodes if self._nodes[node] >= ON_A_NODE]
