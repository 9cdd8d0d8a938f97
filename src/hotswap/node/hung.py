"""Ending a worker that others wait for in vain, after it was asked where it is."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from hotswap.core import messages as m
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool
from hotswap.session.settings import STACKS_SIGNAL

log = logging.getLogger("hotswap.agent")
ANSWER_S = 1.0
"""A handler answers at once; a process in the kernel's hands never does."""
LOOK_S = 0.02
PY_SPY_S = 5.0
STACKS_BYTES_MAX = 20_000


class HungWorkers:
    """One node's."""

    def __init__(self, pool: WorkerPool, send: Callable[[Any], None]) -> None:
        """*send* takes the stacks to the coordinator."""
        self._pool = pool
        self._send = send

    async def end(self, worker: WorkerProcess, told: m.EndHung) -> None:
        """Take the worker's stacks and kill it, unless it advances meanwhile. Its end is an ordinary loss."""
        before = _mark(worker)
        stacks = await self._signalled(worker) or await self._spied(self._pool.pid(worker))
        self._send(m.WorkerStacks(slot=worker.slot, generation=told.generation, stacks=stacks))
        if _mark(worker) != before:
            log.warning("the worker of slot %d advances again, after all: %s", worker.slot, told.reason)
            return
        log.warning("ending the worker of slot %d: %s", worker.slot, told.reason)
        worker.detail = worker.detail or f"hung: {told.reason}"
        self._pool.kill(worker)

    async def _signalled(self, worker: WorkerProcess) -> str:
        """By its own signal handler, which needs no interpreter; empty if it does not answer."""
        loop = asyncio.get_running_loop()
        end, size = loop.time() + ANSWER_S, os.fstat(worker.stacks).st_size
        before = size
        self._pool.kill(worker, STACKS_SIGNAL)
        while loop.time() < end and worker.alive:
            await asyncio.sleep(LOOK_S)
            now = os.fstat(worker.stacks).st_size if worker.alive else size
            if now == size > before:
                break
            size = now
        return os.pread(worker.stacks, STACKS_BYTES_MAX, before).decode(errors="replace") if worker.alive else ""

    async def _spied(self, pid: int) -> str:
        """From outside, where py-spy is installed."""
        command = shutil.which("py-spy")
        if command is None or not pid:
            return ""
        return await asyncio.to_thread(_run, [command, "dump", "--nonblocking", "--pid", str(pid)])


def _mark(worker: WorkerProcess) -> Any:
    said = worker.progressed
    return (said.generation, said.progress.mark) if said is not None else None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return (done.stdout or done.stderr)[:STACKS_BYTES_MAX]
