"""One worker process as its agent sees it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotswap.core import messages as m
from hotswap.core.progress import Progress
from hotswap.core.types import Generation, Slot, Step, WorkerState
from hotswap.replication.memory import MemoryFile
from hotswap.wire import worker_messages as w
from hotswap.wire.links import AsyncLink


@dataclass(kw_only=True, eq=False)
class WorkerProcess:
    """``outputs``: the files that it writes to. ``number``: by which the spawner knows it. ``stacks``: descriptor of the file for its stacks, -1: none.

    ``progressed``: how far it has said to be, and when; ``moved_at``: when that was news. ``fenced``: newest generation the process was told of. ``granted``: the snapshot memory it has mapped.

    ``holds_state``: it was restored, and what it has since belongs to the job; else it has only what its script built, or worse.
    """

    slot: Slot
    link: AsyncLink[Any]
    outputs: tuple[Path, ...] = ()
    number: int = 0
    stacks: int = -1
    progressed: w.Progressed | None = None
    progressed_at: float = 0.0
    moved_at: float = 0.0
    fenced: Generation = 0
    granted: list[MemoryFile] = field(default_factory=list)
    holds_state: bool = False
    built: w.Built | None = None
    parked: w.Parked | None = None
    detail: str = ""
    status: int | None = None
    drained: bool = False
    unwanted: bool = False
    valid_to: Step | None = None

    @property
    def alive(self) -> bool:
        """Not known to have ended."""
        return self.status is None

    def leave(self, fence: m.Fence, *, member: bool) -> None:
        """Its generation ends. What a spare's process has in its hands, or one that counts as new, is not the job's state."""
        self.fenced, self.parked, self.valid_to = fence.generation, None, fence.valid_to
        self.holds_state = self.holds_state and member and self.slot not in fence.lost

    def park(self, parked: w.Parked) -> None:
        """It has left. If its node has missed a plan that went back behind the step where it stands, that step was undone."""
        self.parked = parked
        if self.valid_to is not None and parked.step > self.valid_to:
            self.holds_state = False

    def note(self, said: w.Progressed, now: float) -> None:
        """It has said how far it is."""
        before, self.progressed, self.progressed_at = self.progressed, said, now
        if before is None or before.progress.mark != said.progress.mark:
            self.moved_at = now

    def as_built(self, said: w.Built) -> m.WorkerBuilt:
        """For the coordinator."""
        return m.WorkerBuilt(
            slot=self.slot,
            generation=self.fenced,
            shape=said.shape,
            peers=said.peers,
            rehearsed=said.rehearsed,
            role=said.role,
        )

    def progress(self, generation: Generation, now: float) -> Progress | None:
        """How far it is in *generation*."""
        said = self.progressed
        if said is None or said.generation != generation or not self.alive:
            return None
        return replace(said.progress, mute_s=round(now - self.progressed_at, 1))

    def state(self) -> WorkerState | None:
        """What the parked process holds, None if that is nothing."""
        if self.parked is None or not self.holds_state:
            return None
        return WorkerState(slot=self.slot, step=self.parked.step, dirty=self.parked.dirty, torn=self.parked.torn)

    def describe_end(self) -> str:
        """How the process ended, in words."""
        if self.detail:
            return self.detail
        assert self.status is not None
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit code {self.status}"
