"""The step to resume from: the newest one at which *every* slot can be restored. Mixed steps are never accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotswap.core.types import Held, HeldKind, NodeId, Slot, Source, SourceKind, Step, Suspicion, WorkerState


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A step and, for each slot, where its state at that step is."""

    step: Step
    sources: dict[Slot, Source]


@dataclass(kw_only=True)
class Ledger:
    """Who holds what, as the agents reported it after the fence.

    ``live``: parked survivors. ``peers``: for each slot, the other slots that hold the same shared state. ``suspicion``: what
    a comparison of states has found wrong.
    """

    live: dict[Slot, WorkerState] = field(default_factory=dict)
    own: dict[Slot, dict[Step, tuple[NodeId, Held]]] = field(default_factory=dict)
    replicas: dict[Slot, dict[Step, dict[NodeId, Held]]] = field(default_factory=dict)
    peers: dict[Slot, tuple[Slot, ...]] = field(default_factory=dict)
    suspicion: Suspicion | None = None

    def add(self, node: NodeId, held: Sequence[Held], hosted: Sequence[Slot]) -> None:
        """Enter one node's inventory; *hosted* are the slots that it has in this generation.

        Own snapshots from when it had other slots, in a generation before, are as good as replicas of those.
        """
        for item in held:
            if item.kind is HeldKind.OWN and item.slot in hosted:
                self.own.setdefault(item.slot, {})[item.step] = (node, item)
            else:
                self.replicas.setdefault(item.slot, {}).setdefault(item.step, {})[node] = item

    def largest_nbytes(self) -> int:
        """Of one slot's state, as far as anything is held."""
        items = [item for versions in self.own.values() for _, item in versions.values()]
        items += [item for versions in self.replicas.values() for held in versions.values() for item in held.values()]
        return max((item.shared_nbytes + item.unique_nbytes for item in items), default=0)

    def steps(self) -> list[Step]:
        """Every step that anything is held for, newest first."""
        found = {worker.step for worker in self.live.values() if not worker.torn}
        found.update(step for versions in self.own.values() for step in versions)
        found.update(step for versions in self.replicas.values() for step in versions)
        newest = max(found, default=0) if self.suspicion is None else self.suspicion.verified
        return sorted((step for step in found if step <= newest), reverse=True)

    def source(self, slot: Slot, step: Step) -> Source | None:
        """How *slot* gets to *step*, or None if it cannot."""
        if self.suspicion is not None and slot in self.suspicion.odd:
            has_own = step in self.own.get(slot, {})
            return self._from_others(slot, step) or (Source(kind=SourceKind.OWN) if has_own else None)
        return self._from_anywhere(slot, step)

    def _from_anywhere(self, slot: Slot, step: Step) -> Source | None:
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
        for peer in self._trusted((slot, *self.peers.get(slot, ()))):
            for peers_node, copy in self._whole(peer, step):
                if copy.shared_nbytes == item.shared_nbytes:
                    return Source(
                        kind=SourceKind.REPLICA,
                        unique_from=node,
                        unique_nbytes=item.unique_nbytes,
                        shared_from=peers_node,
                        shared_slot=peer,
                        shared_nbytes=item.shared_nbytes,
                    )
        return None

    def _trusted(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those that do not differ from their peers."""
        return [slot for slot in slots if self.suspicion is None or slot not in self.suspicion.odd]

    def _whole(self, slot: Slot, step: Step) -> list[tuple[NodeId, Held]]:
        """Own snapshots, which hold the shared state as well, wherever they are."""
        here = [self.own[slot][step]] if step in self.own.get(slot, {}) else []
        elsewhere = sorted(self.replicas.get(slot, {}).get(step, {}).items())
        return here + [(node, item) for node, item in elsewhere if item.kind is HeldKind.OWN]

    def distrust(self, slot: Slot, step: Step, node: NodeId) -> None:
        """What *node* has of *slot* at *step* did not serve: look elsewhere."""
        if self.own.get(slot, {}).get(step, ("",))[0] == node:
            del self.own[slot][step]
            self.live.pop(slot, None)
        self.replicas.get(slot, {}).get(step, {}).pop(node, None)

    def trained(self) -> bool:
        """Whether anything here shows that the job has got beyond its initial state."""
        moved = any(worker.step or worker.dirty or worker.torn for worker in self.live.values())
        return moved or any(step > 0 for step in self.steps())


def choose(slots: Sequence[Slot], ledger: Ledger) -> Resume | None:
    """Newest step every one of *slots* can be restored to, or None when some slot's state is gone."""
    for step in ledger.steps():
        sources = {slot: source for slot in slots if (source := ledger.source(slot, step)) is not None}
        if len(sources) == len(slots):
            return Resume(step=step, sources=sources)
    return None


def both_ways(peers: Mapping[Slot, tuple[Slot, ...]]) -> dict[Slot, tuple[Slot, ...]]:
    """Shared state is shared both ways: a slot that nobody could ask any more is still known to its peers."""
    known: dict[Slot, set[Slot]] = {}
    for slot, others in peers.items():
        for other in others:
            known.setdefault(slot, set()).add(other)
            known.setdefault(other, set()).add(slot)
    return {slot: tuple(sorted(others - {slot})) for slot, others in known.items()}


def redone_steps(live: Mapping[Slot, WorkerState], resume_step: Step) -> int:
    """How many steps are executed again, in whole or in part."""
    begun = [worker.step + (1 if worker.dirty or worker.torn else 0) for worker in live.values()]
    return max(0, max(begun, default=resume_step) - resume_step)
