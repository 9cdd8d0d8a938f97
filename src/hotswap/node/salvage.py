"""Writing what this node has in memory of a job that gives up, its own slots' state and that of nodes that are gone."""

from __future__ import annotations

import logging

from hotswap.core import messages as m
from hotswap.errors import HotswapError
from hotswap.node.checkpoints import CallProcess
from hotswap.node.memory_keeper import MemoryKeeper

log = logging.getLogger("hotswap.agent")


async def salvage(order: m.Salvage, memory: MemoryKeeper, call: CallProcess) -> None:
    """Bring each slot's state into memory of this node and write it. One that fails keeps no other from being written."""
    for slot, source in order.sources.items():
        try:
            await memory.prepare(slot, source, [])
            if await memory.locate(slot, source, order.step) is None:
                log.error("slot %d at step %d is not here any more", slot, order.step)
                continue
            memory.checkpoints.write(slot, order.step, None, call)
        except HotswapError as error:
            log.error("slot %d at step %d cannot be saved: %s", slot, order.step, error)
