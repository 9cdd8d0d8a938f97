"""The agent's part of a drill: it strikes its own processes, and itself. Only where its launcher was told that it may."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.drills import DRILLS, Drill, Victim
from hotswap.core.types import Slot
from hotswap.node.drills import NOT_ALLOWED
from hotswap.node.stopped import is_stopped
from hotswap.node.worker_process import WorkerProcess
from hotswap.node.workers import WorkerPool

log = logging.getLogger("hotswap.agent")
LOOK_S = 0.02


class Strikes:
    """One node's."""

    def __init__(
        self,
        config: AgentConfig,
        pool: WorkerPool,
        workers: Mapping[Slot, WorkerProcess],
        send: Callable[[Any], None],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        """*workers*: those there are, as they come and go. *send* tells the coordinator, *flush* waits until that is out."""
        self._config = config
        self._pool = pool
        self._workers = workers
        self._send = send
        self._flush = flush

    async def obey(self, order: m.Strike) -> None:
        """Strike, and say so; what ends this process is said before."""
        drill = DRILLS.get(order.fault)
        if not self._config.allow_inject:
            self._answer(order, refusal=NOT_ALLOWED)
        elif drill is None:
            self._answer(order, refusal=f"this agent knows no fault {order.fault!r}; is it of another version?")
        elif drill.victim is Victim.WORKER:
            await self._strike_worker(order, drill)
        else:
            await self._strike_node(order, drill)

    def _answer(self, order: m.Strike, *pids: int, refusal: str = "") -> None:
        self._send(m.Struck(number=order.number, pids=pids, refusal=refusal))

    async def _strike_worker(self, order: m.Strike, drill: Drill) -> None:
        worker = self._workers.get(order.slot)
        pid = self._pool.pid(worker) if worker is not None and worker.alive else 0
        if worker is None or not pid:
            self._answer(order, refusal=f"slot {order.slot} has no process just now; try again when the job trains")
            return
        log.warning("drill: %s, slot %d, process %d: %s", drill.what, order.slot, pid, order.reason)
        self._pool.kill(worker, drill.number)
        end = asyncio.get_running_loop().time() + self._config.timing.detection_budget_s
        while worker.alive and not (drill.number == signal.SIGSTOP and is_stopped(pid)):
            if asyncio.get_running_loop().time() > end:
                self._answer(order, pid, refusal=f"process {pid} got {drill.number.name}, which has had no effect yet")
                return
            await asyncio.sleep(LOOK_S)
        self._answer(order, pid)

    async def _strike_node(self, order: m.Strike, drill: Drill) -> None:
        own = os.getpid()
        if drill.victim is Victim.NODE and os.getpgrp() != own:
            self._answer(order, refusal="the agent leads no process group, as it does under 'hotswap run'")
            return
        log.warning("drill: %s: %s", drill.what, order.reason)
        pids = group_members(own) if drill.victim is Victim.NODE else [own]
        self._answer(order, *pids)
        # A word that is with the kernel arrives, whatever becomes of this process.
        await self._flush()
        if drill.victim is Victim.NODE:
            os.killpg(own, drill.number)
        else:
            os.kill(own, drill.number)


def group_members(leader: int, proc: Path = Path("/proc")) -> list[int]:
    """Pids of the processes in the group that *leader* leads, itself first: workers join their agent's."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return sorted(found, key=lambda pid: (pid != leader, pid))
