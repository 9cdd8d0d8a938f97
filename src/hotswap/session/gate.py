"""The commit gate of a step: begun as soon as this slot has nothing left to prove, passed before the update.

In between the all-reduce runs beside the forward and backward pass. Waited for at the update alone it would cost its whole
latency wherever the host has just waited for the device, as Megatron-Core's does for the gradient norm.
"""

from __future__ import annotations

from hotswap.comm import Groups
from hotswap.core.types import Generation, Step
from hotswap.session.mailbox import Mailbox


class CommitGate:
    """One gate at a time. ``advance`` belongs to the listening thread as well, all else to the thread that trains."""

    def __init__(self, groups: Groups, mailbox: Mailbox) -> None:
        """*mailbox* knows which snapshots are acknowledged."""
        self._groups = groups
        self._mailbox = mailbox
        self._place: tuple[Generation, Step] = (0, -1)
        self._needs: Step | None = None
        self._proposal = 0
        self._begun = True
        self._held = False
        self._agreed: int | None = None

    def arm(
        self, generation: Generation, step: Step, *, needs: Step | None, proposal: int, at_wait: bool = False
    ) -> None:
        """An attempt of *step* begins. The snapshot of *needs* has to be acknowledged before this slot takes part.

        *at_wait*: there is something else that has to be done before, which is so when ``wait`` is called.

        An attempt that the script tries once more after an error of its own meets the gate that it has begun: the other slots
        may have passed it.
        """
        with self._mailbox.lock:
            if self._place == (generation, step):
                return
            self._place = (generation, step)
            self._needs, self._proposal, self._begun, self._held = needs, proposal, False, at_wait
            self._agreed = None
        self.advance()

    def advance(self) -> None:
        """Take part, if it is time and was not done before."""
        with self._mailbox.lock:
            acked = self._needs is None or self._mailbox.acked >= self._needs
            if acked and not self._begun and not self._held and not self._mailbox.fenced(self._place[0]):
                self._begun = True
                self._groups.begin_gate(self._proposal)

    def wait(self) -> int:
        """Wait for all slots, once the snapshot is acknowledged; the largest proposal. Fenced or PeerUnreachable as for ``Groups.gate``."""
        if self._agreed is None:
            with self._mailbox.lock:
                self._mailbox.require(self._place[0])
                self._held = False
                self.advance()
            self._agreed = self._groups.pass_gate()
        return self._agreed
