"""A check of this node's health while its workers train: only what neither disturbs them nor is disturbed by them.

GPUs are left alone, but for what their driver says of them; memory and /dev/shm are as full as the job makes them, so that says
nothing about the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from hotswap.core.messages import NodeChecked
from hotswap.core.types import NodeId, host_of
from hotswap.diagnosis.model import Evidence
from hotswap.diagnosis.probes import as_evidence, run_probes
from hotswap.node.machine import Machine
from hotswap.node.witness import clue_of

log = logging.getLogger("hotswap.agent")
PROBES = ("memory_errors", "disk", "clock", "fabric_manager", "gpu_health")
DEADLINE_S = 20.0
"""Of each probe."""
PAUSE_S = 60.0
"""Between two checks: a node that is suspected again and again is not kept busy with proving its innocence."""


class NodeCheck:
    """One node's. All methods run on the agent's event loop."""

    def __init__(self, node: NodeId, send: Callable[[NodeChecked], None], probes: Sequence[str] = PROBES) -> None:
        """*send* takes what came out to the coordinator."""
        self._node = node
        self._send = send
        self._probes = probes
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0

    def ask(self, reason: str) -> None:
        """Check now, unless it was done just before or is being done."""
        now = asyncio.get_running_loop().time()
        if now >= self._not_before and (self._task is None or self._task.done()):
            log.info("checking this node: %s", reason)
            self._not_before = now + PAUSE_S
            self._task = asyncio.get_running_loop().create_task(self._check())

    async def close(self) -> None:
        """Wait for nothing: a probe that is under way ends by its own deadline, and nobody needs to know any more."""
        if self._task is not None:
            self._task.cancel()

    async def _check(self) -> None:
        try:
            found = await asyncio.to_thread(self._look)
        except Exception:
            log.exception("this node could not be checked")
        else:
            self._send(NodeChecked(clues=tuple(clue_of(one) for one in found)))

    def _look(self) -> list[Evidence]:
        host = host_of(self._node)
        results = run_probes(self._probes, deadline_s=DEADLINE_S)
        return [*as_evidence(results, node=host, now=time.time()), *Machine(self._node).facts()]
