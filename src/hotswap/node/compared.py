"""What an agent does with what its workers say about comparisons of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotswap.node.forward import forwarded
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool
from hotswap.wire import worker_messages as w


def heed(
    worker: WorkerProcess,
    told: w.Comparing | w.Compared,
    memory: MemoryKeeper,
    pool: WorkerPool,
    send: Callable[[Any], None],
) -> None:
    """Remember it, pass it on, and end a worker that is odd: whatever made it so, its process is not trusted any more."""
    if isinstance(told, w.Comparing):
        memory.agreement.comparing(told.step, told.verified)
        return
    memory.compared(worker.slot, told, pool.call)
    if (news := forwarded(worker.slot, told)) is not None:
        send(news)
    if worker.slot in told.odd:
        worker.detail = f"its state differs from that of its peers at step {told.step}: {told.detail}"
        pool.kill(worker)
