"""One attempt to bring a generation to life: what has been reported so far, and how long each phase took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotswap.core import messages as m
from hotswap.core import resume
from hotswap.core.events import Fields
from hotswap.core.keep import groups_to_keep
from hotswap.core.transitions import Phase
from hotswap.core.types import Membership, NodeId, Slot, Step, Suspicion

PHASE_NAMES = {
    Phase.FENCING: "fence",
    Phase.WAITING: "plan",
    Phase.REBUILDING: "rebuild",
    Phase.RESTORING: "restore",
    Phase.REDOING: "redo",
}
"""The phases of a recovery as users know them; waiting for a node is planning that can't go on."""


@dataclass(kw_only=True)
class Halt:
    """An order to all workers to stand still at one boundary. ``slots``: who does; ``first_at``: since when somebody does.

    ``durable``: so that the state there goes to storage, before nodes leave that nobody replaces, or, if it ``grows``, before the
    job goes on with more nodes; else for a swap.
    """

    durable: bool
    grows: bool = False
    slots: set[Slot] = field(default_factory=set)
    step: Step = -1
    first_at: float | None = None


@dataclass(kw_only=True)
class Recovery:
    """``lost``: slots whose process is new and holds nothing. ``started_at`` is when the first attempt began, in seconds.

    ``probe``: no loss explains the end of the last generation; the network may. ``moved_nbytes``: what a slot's state can have
    to travel, at most: fetched, and sent on to its holder. ``listens_until``: a new coordinator gives nodes until then that may
    have what is missing, and have not found it yet.
    """

    cause: str
    started_at: float
    phase_at: float
    lost: frozenset[Slot]
    probe: bool = False
    fenced: dict[NodeId, m.NodeFenced] = field(default_factory=dict)
    connected: set[Slot] = field(default_factory=set)
    ready: set[Slot] = field(default_factory=set)
    resume_step: Step = 0
    moved_nbytes: int = 0
    listens_until: float | None = None
    redone: int = 0
    phases_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASE_NAMES.values(), 0.0))

    def close(self, phase: Phase, now: float) -> float:
        """End a phase; its length in milliseconds. Attempts that failed count as well: somebody waited for them."""
        elapsed_ms = round(1000 * (now - self.phase_at), 3)
        self.phase_at = now
        self.phases_ms[PHASE_NAMES[phase]] = round(self.phases_ms[PHASE_NAMES[phase]] + elapsed_ms, 3)
        return elapsed_ms

    def summary(self, now: float) -> Fields:
        """For the event log, at its end; ``total`` counts from the first sign of the loss. Times in milliseconds."""
        return {
            "cause": self.cause,
            "resume_step": self.resume_step,
            "redone_steps": self.redone,
            "phases_ms": {**self.phases_ms, "total": round(1000 * (now - self.started_at), 3)},
        }

    def unreachable(self) -> dict[NodeId, tuple[NodeId, ...]]:
        """Whom each node could not reach."""
        return {node: report.unreachable for node, report in self.fenced.items()}

    def ledger(
        self, membership: Membership, peers: Mapping[Slot, tuple[Slot, ...]], suspicion: Suspicion | None = None
    ) -> resume.Ledger:
        """Who holds what; *suspicion*: what is suspect beside what the nodes say. What a node's workers are said to have of a slot that it doesn't have now is not about this job."""
        ledger = resume.Ledger(peers=resume.both_ways(peers))
        for node, report in self.fenced.items():
            hosted = membership.slots_of(node)
            ledger.add(node, report.held, hosted)
            ledger.live.update({w.slot: w for w in report.workers if w.slot in hosted and w.slot not in self.lost})
        ledger.suspicion = self.suspicion(suspicion)
        return ledger

    def suspicion(self, known: Suspicion | None) -> Suspicion | None:
        """What all that have heard of a failed comparison say together. Whoever did may not be here any more, or not yet."""
        said = [known, *(report.suspicion for report in self.fenced.values())]
        heard = [suspicion for suspicion in said if suspicion is not None]
        if not heard:
            return None
        odd = {slot for suspicion in heard for slot in suspicion.odd}
        return Suspicion(verified=min(suspicion.verified for suspicion in heard), odd=tuple(sorted(odd)))

    def keep(self, membership: Membership) -> frozenset[str]:
        """Groups that nobody disturbed."""
        return groups_to_keep(
            {
                slot: groups
                for node, report in self.fenced.items()
                for slot, groups in report.groups.items()
                if slot in membership.slots_of(node)
            },
            self.lost,
        )

    def checkpoint_step(self) -> Step | None:
        """Newest durable checkpoint that anyone sees."""
        known = [report.checkpoint_step for report in self.fenced.values() if report.checkpoint_step is not None]
        return max(known, default=None)
