"""What an agent passes on to the coordinator as its workers say it."""

from __future__ import annotations

from typing import Any

from hotswap.core import messages as m
from hotswap.core.types import Slot
from hotswap.wire import worker_messages as w


def forwarded(slot: Slot, message: Any) -> Any | None:
    """The message for the coordinator; None if it is for the agent alone."""
    if isinstance(message, w.Connected):
        return m.WorkerConnected(slot=slot, generation=message.generation)
    if isinstance(message, w.Trouble):
        return m.WorkerTrouble(slot=slot, generation=message.generation, detail=message.detail)
    if isinstance(message, w.Raised):
        return m.WorkerRaised(slot=slot, generation=message.generation, error=message.error)
    if isinstance(message, w.Halted):
        return m.WorkerHalted(slot=slot, generation=message.generation, step=message.step)
    if isinstance(message, w.Compared):
        return _compared(slot, message)
    if isinstance(message, w.Paced):
        return m.SnapshotsPaced(slot=slot, generation=message.generation, step=message.step, interval=message.interval)
    return None


def _compared(slot: Slot, message: w.Compared) -> m.StateCompared | None:
    """As long as all agree, one slot's word is enough."""
    if slot and not (message.odd or message.undecided):
        return None
    return m.StateCompared(
        slot=slot,
        generation=message.generation,
        step=message.step,
        verified=message.verified,
        odd=message.odd,
        undecided=message.undecided,
        detail=message.detail,
    )
