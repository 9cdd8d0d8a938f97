"""From the choice of a resume step and its sources to the plan that all nodes are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hotswap.core import messages as m
from hotswap.core.resume import Ledger, Resume
from hotswap.core.types import Generation, HeldKind, NodeId, Slot, Source, SourceKind, Step


def everywhere(slots: Sequence[Slot], step: Step, kind: SourceKind) -> Resume:
    """All slots at *step*, from the same *kind* of source, which belongs to no node."""
    return Resume(step=step, sources={slot: Source(kind=kind) for slot in slots})


def plan_of(
    generation: Generation,
    choice: Resume,
    ledger: Ledger,
    holders: Mapping[Slot, tuple[NodeId, ...]],
    keep: Iterable[str],
) -> m.Plan:
    """The plan by which *generation* comes to *choice*; what a holder lacks of that step has to be sent to it."""
    lacking = {
        slot: tuple(node for node in nodes if not _is_held(slot, node, choice, ledger))
        for slot, nodes in holders.items()
    }
    return m.Plan(
        generation=generation,
        resume_step=choice.step,
        sources=choice.sources,
        holders=dict(holders),
        push={slot: nodes for slot, nodes in lacking.items() if nodes},
        keep=tuple(sorted(keep)),
    )


def _is_held(slot: Slot, holder: NodeId, choice: Resume, ledger: Ledger) -> bool:
    """Whether the holder has the very state that the plan restores. A state not taken from memory is nowhere yet."""
    from_memory = choice.sources[slot].kind not in (SourceKind.FRESH, SourceKind.CHECKPOINT)
    item = ledger.replicas.get(slot, {}).get(choice.step, {}).get(holder)
    # What it made itself when it had the slot is freed as soon as training goes on.
    return from_memory and item is not None and item.kind is HeldKind.REPLICA
