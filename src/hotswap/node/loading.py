"""What a worker is told about memory: which files are its own, and where the state lies that it is to load."""

from __future__ import annotations

from dataclasses import replace

from hotswap.core import messages as m
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.worker_process import WorkerProcess
from hotswap.replication.buffers import Located
from hotswap.wire import worker_messages as w


def grant(worker: WorkerProcess, memory: MemoryKeeper) -> None:
    """Hand the worker the memory files of its slot."""
    worker.granted = files = memory.buffers(worker.slot)
    granted = w.Granted(nbytes=files[0].nbytes, buffers=len(files), free=memory.free(worker.slot))
    worker.link.send(granted, fds=[file.fd for file in files])


def grant_new(worker: WorkerProcess, memory: MemoryKeeper) -> None:
    """The same, unless it has them."""
    if worker.granted != memory.buffers(worker.slot):
        grant(worker, memory)


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
