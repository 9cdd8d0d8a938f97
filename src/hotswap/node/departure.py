"""A node that is told to leave: it says so, helps its workers to a boundary, and goes when the coordinator lets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.types import Generation
from hotswap.errors import EXIT_REQUEUE
from hotswap.node.worker_process import WorkerProcess

log = logging.getLogger("hotswap.agent")


class Departure:
    """One node's. What it was told outlives any coordinator: each registration says it again."""

    def __init__(self, config: AgentConfig, send: Callable[[Any], None], leave: Callable[[int], None]) -> None:
        """*send* tells the coordinator, if there is one; *leave* ends this agent."""
        self._stay_s = config.drain_s
        self._patience_s = config.drain_s + config.timing.phase_s
        self._send = send
        self._leave = leave
        self._until: float | None = None

    @property
    def left_s(self) -> float | None:
        """How long this node may still stay; None: for ever."""
        return None if self._until is None else max(0.0, self._until - asyncio.get_running_loop().time())

    def begin(self, reason: str) -> None:
        """This node has to leave. Once told, it does."""
        if self._until is None:
            loop = asyncio.get_running_loop()
            self._until = loop.time() + self._stay_s
            log.info("this node is to leave: %s; it stays %.0f s at most without a replacement", reason, self._stay_s)
            loop.call_later(self._patience_s, self._give_up)
        self._send(m.NodeDraining(leaves_in_s=self.left_s or 0.0, reason=reason))

    def take(self, message: Any, generation: Generation, workers: Iterable[WorkerProcess]) -> None:
        """Carry out what concerns leaving; *workers* are those of *generation*."""
        if isinstance(message, m.DrainNode):
            self.begin(message.reason)
        elif isinstance(message, m.Halt) and message.generation == generation:
            for worker in workers:
                worker.link.send(message)

    def _give_up(self) -> None:
        """Nobody has let it go: there is no coordinator, or the job waits for nodes itself."""
        log.error("this node was to leave %.0f s ago; it leaves now", self._patience_s)
        self._leave(EXIT_REQUEUE)
