"""The step to resume from: the newest one at which *every* slot can be restored. Mixed steps are never accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotswap.core.types import Held, HeldKind, NodeId, Slot, Source, SourceKind, Step, WorkerState


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A step and, for each slot, where its state at that step is."""

    step: Step
    sources: dict[Slot, Source]


@dataclass(kw_only=True)
class Ledger:
    """Who holds what, as the agents reported it after the fence.

    ``live``: parked survivors. ``peers``: for each slot, the other slots that hold the same shared state.
    """

    live: dict[Slot, WorkerState] = field(default_factory=dict)
    own: dict[Slot, dict[Step, tuple[NodeId, Held]]] = field(default_factory=dict)
    replicas: dict[Slot, dict[Step, dict[NodeId, Held]]] = field(default_factory=dict)
    peers: dict[Slot, tuple[Slot, ...]] = field(default_factory=dict)

    def add(self, node: NodeId, held: Sequence[Held], hosted: Sequence[Slot]) -> None:
        """Enter one node's inventory; own snapshots count only for slots the node has (*hosted*) in this generation."""
        for item in held:
            if item.kind is HeldKind.REPLICA:
                self.replicas.setdefault(item.slot, {}).setdefault(item.step, {})[node] = item
            elif item.slot in hosted:
                self.own.setdefault(item.slot, {})[item.step] = (node, item)

    def steps(self) -> list[Step]:
        """Every step that anything is held for, newest first."""
        found = {worker.step for worker in self.live.values() if not worker.torn}
        for table in (self.own, self.replicas):
            found.update(step for versions in table.values() for step in versions)  # type: ignore[attr-defined]
        return sorted(found, reverse=True)

    def source(self, slot: Slot, step: Step) -> Source | None:
        """How *slot* gets to *step*, or None if it cannot."""
        has_own = step in self.own.get(slot, {})
        worker = self.live.get(slot)
        at_step = worker is not None and worker.step == step and not worker.torn
        # A begun attempt has moved random state and loader; only the own snapshot can take those back.
        if worker is not None and at_step and (has_own or not worker.dirty):
            return Source(kind=SourceKind.LIVE)
        if has_own:
            return Source(kind=SourceKind.OWN)
        return self._from_others(slot, step)

    def _from_others(self, slot: Slot, step: Step) -> Source | None:
        replicas = self.replicas.get(slot, {}).get(step)
        if not replicas:
            return None
        node, item = min(replicas.items())
        if item.shared_nbytes == 0:
            return Source(kind=SourceKind.REPLICA, unique_from=node, unique_nbytes=item.unique_nbytes)
        for peer in self.peers.get(slot, ()):
            if peer != slot and step in self.own.get(peer, {}):
                return Source(
                    kind=SourceKind.REPLICA,
                    unique_from=node,
                    unique_nbytes=item.unique_nbytes,
                    shared_from=self.own[peer][step][0],
                    shared_slot=peer,
                    shared_nbytes=item.shared_nbytes,
                )
        return None


def choose(slots: Sequence[Slot], ledger: Ledger) -> Resume | None:
    """Newest step every one of *slots* can be restored to, or None when some slot's state is gone."""
    for step in ledger.steps():
        sources = {slot: source for slot in slots if (source := ledger.source(slot, step)) is not None}
        if len(sources) == len(slots):
            return Resume(step=step, sources=sources)
    return None


def redone_steps(live: Mapping[Slot, WorkerState], resume_step: Step) -> int:
    """How many steps are executed again, in whole or in part."""
    begun = [worker.step + (1 if worker.dirty or worker.torn else 0) for worker in live.values()]
    return max(0, max(begun, default=resume_step) - resume_step)
