"""A node's answer to a fence: that its workers have left the old generation, what it then holds, and whom it reaches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.types import Endpoint, Generation, NodeId, Slot
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.node.worker_process import WorkerProcess


class FenceAnswer:
    """One node's, to the fence of the newest generation. All methods run on the event loop's thread."""

    def __init__(
        self,
        config: AgentConfig,
        node: NodeId,
        memory: MemoryKeeper,
        workers: Mapping[Slot, WorkerProcess],
        finished: Collection[Slot],
        kill: Callable[[WorkerProcess], None],
        reach: Callable[[Mapping[NodeId, Endpoint], float], Awaitable[tuple[NodeId, ...]]],
        send: Callable[[Any], None],
    ) -> None:
        """*workers* and *finished*, slots whose worker has come to its end, are the agent's, as they change; *send* tells the coordinator."""
        self._config = config
        self._node = node
        self._memory = memory
        self._workers = workers
        self._finished = finished
        self._kill = kill
        self._reach = reach
        self._send = send
        self._generation: Generation = 0
        self._unreachable: tuple[NodeId, ...] | None = None
        self._given = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, generation: Generation) -> None:
        """The workers have been told to leave every older generation; they have so long for it."""
        self._generation, self._unreachable, self._given = generation, None, False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._config.timing.park_s, self._kill_unparked, generation)

    async def look_around(self, fence: m.Fence) -> None:
        """What belongs to the answer and may take its time: which checkpoint there is, and whom this node reaches."""
        others = {node: endpoint for node, endpoint in fence.endpoints.items() if node != self._node and fence.probe}
        cut_off, _ = await asyncio.gather(
            self._reach(others, self._config.timing.connect_s), self._memory.checkpoints.find()
        )
        if fence.generation == self._generation:
            self._unreachable = cut_off
            self.give()

    def _kill_unparked(self, generation: Generation) -> None:
        """A worker that cannot be stopped in place is stopped for good; its state is in this node's memory."""
        if generation == self._generation and not self._given:
            for worker in self._unparked():
                worker.detail = f"did not leave the old generation within {self._config.timing.park_s:g} s"
                self._kill(worker)

    def _unparked(self) -> list[WorkerProcess]:
        """Who still has to leave the old generation; a worker that is not built yet was never in one.

        Also the dead whose last words are not read yet: one of them may say which buffer it was overwriting.
        """
        return [worker for worker in self._workers.values() if worker.built is not None and worker.parked is None]

    def give_once(self) -> None:
        """One worker less is waited for: answer, unless that was done."""
        if not self._given:
            self.give()

    def give(self) -> None:
        """Answer, as soon as all is known; again if the coordinator asks again."""
        if self._unparked() or self._unreachable is None:
            return
        self._given = True
        living = [worker for worker in self._workers.values() if worker.alive]
        self._send(
            m.NodeFenced(
                generation=self._generation,
                held=self._memory.inventory(),
                workers=tuple(state for worker in living if (state := worker.state()) is not None),
                groups={worker.slot: worker.parked.groups for worker in living if worker.parked is not None},
                checkpoint_step=self._memory.checkpoints.step,
                unreachable=self._unreachable,
                suspicion=self._memory.suspicion,
            )
        )
        for slot in sorted(self._finished):
            self._send(m.WorkerFinished(slot=slot, generation=self._generation))
