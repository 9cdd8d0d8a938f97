"""One worker's part in comparing the state that slots share, as ``session.integrity`` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.core.integrity import NEVER
from hotswap.core.types import Step
from hotswap.sim.execution import Thread
from hotswap.wire import worker_messages as w

if TYPE_CHECKING:
    from hotswap.sim.worker import WorkerModel

AGAIN_S = 2.0


class Comparison:
    """At most one is under way: begun in the gate of a step, concluded before the next snapshot is relied on."""

    def __init__(self, worker: WorkerModel) -> None:
        """Nothing has been compared yet."""
        self.verified: Step = NEVER
        """The newest step at which all agreed."""
        self._worker = worker
        self._last: Step | None = None
        self._begun: Step | None = None
        self._first = False

    @property
    def under_way(self) -> bool:
        """Whether one was begun and is not concluded."""
        return self._begun is not None

    def restart(self, step: Step) -> None:
        """Go on from *step*: what was found in an undone future is void."""
        self._last = self._begun = None
        self.verified = min(self.verified, step)

    def begin(self) -> None:
        """Hash the state, of which there is a snapshot, if it is time."""
        worker = self._worker
        every, step = worker.job.setup.integrity, worker.step
        first = self._last is None
        if not every or worker.kept.step != step:
            return
        if self._last is None or worker.durable(step) or step - self._last >= every:
            self._last = self._begun = step
            self._first = first
            worker.say(w.Comparing(generation=worker.generation, step=step, verified=self.verified))

    def conclude(self) -> Thread:
        """Exchange what was found; if somebody differs, say so until another generation begins."""
        worker, step, self._begun = self._worker, self._begun, None
        if step is None:
            return
        yield from worker.collective("compare")
        worker.check()
        found, verified = worker.job.ballots.found(worker.membership, step)
        if found.agreed:
            self.verified = verified = step
        told = w.Compared(
            generation=worker.generation,
            step=step,
            verified=verified,
            odd=found.odd,
            durable=worker.durable(step) and not self._first,
        )
        worker.say(told)
        while not found.agreed:
            again = worker.world.now + AGAIN_S
            worker.world.at(again, worker.execution.poke)
            yield lambda again=again: worker.fenced() or worker.world.now >= again  # type: ignore[misc]
            worker.check()
            worker.say(told)
