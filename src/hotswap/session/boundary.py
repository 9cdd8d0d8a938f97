"""The step boundary at which all workers halt, agreed on at the commit gate.

One worker that was told to halt is enough: its proposal at the gate tells all others. The step that the gate belongs to may end
without a snapshot, so all halt after the next one, whose gate waits for the last snapshot as every gate before a snapshot does.
"""

from __future__ import annotations

from collections.abc import Callable

from hotswap.core.types import Generation, Step
from hotswap.session.mailbox import Mailbox
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

_HALT, _DURABLE = 1 << 16, 1 << 17
"""Above every interval that a gate may carry."""


class Boundary:
    """One worker's. ``at``: the step after which it halts, -1: none; ``durable``: with a durable checkpoint."""

    def __init__(self, mailbox: Mailbox) -> None:
        """*mailbox*: where the agent's word arrives."""
        self._mailbox = mailbox
        self.at: Step = -1
        self.durable = False

    def restart(self) -> None:
        """A new generation: nothing is agreed on."""
        self.at, self.durable = -1, False

    def proposal(self, interval: int) -> int:
        """What this worker says at the gate: steps between snapshots, and whether to halt."""
        halt = self._mailbox.halt
        if halt is None:
            return interval
        return interval | _HALT | (_DURABLE if halt.durable else 0)

    def agree(self, said: int, step: Step, interval: int) -> int:
        """What the gate of *step* says; the interval, which stays *interval* where a halt is asked for."""
        if said < _HALT:
            return said
        # Who has heard of it says it again at the next gate, which is the one before the halt.
        if self.at <= step:
            self.at, self.durable = step + 2, said >= _DURABLE
        return interval

    def halts_at(self, step: Step) -> bool:
        """Whether all stand still when *step* updates are done. Then what was asked for is done, whatever comes of it."""
        return step == self.at

    def arrive(self) -> None:
        """This worker stands there."""
        self._mailbox.halt = None

    def stand_still(
        self, link: WorkerLink, wait_acked: Callable[[Generation, Step], None], generation: Generation, halt_s: float
    ) -> bool:
        """Wait there for another membership, for *halt_s* seconds at most; whether one has come. Fenced if it comes before all is safe.

        *wait_acked* waits until a step is complete at its holder.
        """
        self.arrive()
        wait_acked(generation, self.at)
        link.send(w.Halted(generation=generation, step=self.at))
        return self._mailbox.wait_fenced(generation, halt_s)
