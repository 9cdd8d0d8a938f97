"""What a worker is told about memory: which files are its own, and where the state lies that it is to load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from hotswap.core import messages as m
from hotswap.core.types import Slot
from hotswap.errors import HotswapError
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool
from hotswap.replication.buffers import Located
from hotswap.wire import worker_messages as w

log = logging.getLogger("hotswap.agent")


def grant(worker: WorkerProcess, memory: MemoryKeeper) -> None:
    """Hand the worker the memory files of its slot."""
    worker.granted = files = memory.buffers(worker.slot)
    granted = w.Granted(nbytes=files[0].nbytes, buffers=len(files), free=memory.free(worker.slot))
    worker.link.send(granted, fds=[file.fd for file in files])


def grant_new(worker: WorkerProcess, memory: MemoryKeeper) -> None:
    """The same, unless it has them."""
    if worker.granted != memory.buffers(worker.slot):
        grant(worker, memory)


async def reserve(
    worker: WorkerProcess,
    wanted: w.Reserve,
    memory: MemoryKeeper,
    pool: WorkerPool,
    workers: Mapping[Slot, WorkerProcess],
) -> None:
    """Make the memory that a worker asks for, and hand it over if it is still among *workers*. One that cannot have it is ended."""
    try:
        await memory.reserve(worker.slot, wanted.nbytes, wanted.buffers)
    except HotswapError as error:
        if wanted.ahead:
            log.warning("a spare for slot %d makes its memory when it is needed: %s", worker.slot, error)
        else:
            pool.refuse(worker, error)
        return
    if workers.get(worker.slot) is worker:
        grant(worker, memory)
    elif worker.slot not in workers:
        memory.vault.forget_empty(worker.slot)


async def bring(
    worker: WorkerProcess,
    memory: MemoryKeeper,
    plan: m.Plan,
    workers: Mapping[Slot, WorkerProcess],
    current: Callable[[], bool],
) -> None:
    """While the worker connects, bring the slot's bytes into this node's memory, then tell it where they are.

    HotswapError if they cannot be had. Nothing is said if *plan* is not *current* any more by then, and no memory is left for a slot that
    is not among *workers*: the next generation may have other slots.
    """
    source = plan.sources[worker.slot]
    await memory.prepare(worker.slot, source, worker.granted)
    if not current():
        if worker.slot not in workers:
            memory.vault.forget_empty(worker.slot)
        return
    grant_new(worker, memory)  # now, for locking it for a device takes as long as filling it
    located = await memory.locate(worker.slot, source, plan.resume_step)
    if current() and worker.alive:
        load(worker, memory, plan, located)


def load(worker: WorkerProcess, memory: MemoryKeeper, plan: m.Plan, located: Located | None) -> None:
    """Tell the worker to be at the plan's resume step, with the state at *located*; None: it needs none of it."""
    grant_new(worker, memory)
    source, free = plan.sources[worker.slot], memory.free(worker.slot) if worker.granted else 0
    told = w.Load(generation=plan.generation, resume_step=plan.resume_step, source=source.kind, free=free)
    if located is not None:
        told = replace(
            told, buffer=located.buffer, shared_nbytes=located.shared_nbytes, unique_nbytes=located.unique_nbytes
        )
    worker.link.send(told)
