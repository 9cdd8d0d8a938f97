"""The coordinator's part of a drill: from an operator's order to what has been struck, or why nothing was."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

from hotswap.config import CoordinatorConfig
from hotswap.core import drills
from hotswap.core import messages as m
from hotswap.core.commands import Inject, InjectState, Outcome
from hotswap.core.drills import DRILLS, Aim
from hotswap.core.job import Job
from hotswap.core.types import NodeId
from hotswap.wire.links import FLUSH_S, AsyncLink

LOOK_S = 0.05
SILENT_BEATS = 2
"""A node that lives lets none of its heartbeats out; one may be on its way."""
NOT_ALLOWED = (
    "this job was not started for drills, so nothing was struck: they need --allow-inject, on 'hotswap run' of each node that may be "
    "struck and, where it is used, on 'hotswap coordinator'"
)
WITHIN_S_MAX = 3600.0


class Drills:
    """One coordinator's. All methods run on its event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Callable[[], float],
        job: Job,
        links: Mapping[NodeId, AsyncLink[Any]],
        record: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """*links* are those of agents, as they come and go; *record* appends to the event log."""
        self._config = config
        self._clock = clock
        self._job = job
        self._links = links
        self._record = record
        self._numbers = itertools.count(1)
        self._ordered: dict[int, tuple[NodeId, asyncio.Future[m.Struck | None]]] = {}

    async def carry_out(self, order: Inject, operator: AsyncLink[Any]) -> None:
        """Do what *order* says, and answer it. This process may end in it."""
        aim = self._aim(order)
        if aim.refusal:
            answer = InjectState(outcome=Outcome.REFUSED, detail=aim.refusal)
        else:
            self._note(order, aim)
            answer = await self._strike(order, aim) if aim.node else _itself()
        operator.send(answer)
        await operator.flush(FLUSH_S)
        if answer.outcome is Outcome.STRUCK and not aim.node:
            os.kill(os.getpid(), DRILLS[order.fault].number)

    def _aim(self, order: Inject) -> Aim:
        if not self._config.allow_inject:
            return Aim(refusal=NOT_ALLOWED)
        if not 0 < order.within_s <= WITHIN_S_MAX:
            return Aim(refusal=f"a drill takes between 0 and {WITHIN_S_MAX:g} s, not {order.within_s:g} s")
        return drills.aim(self._job, order)

    def _note(self, order: Inject, aim: Aim) -> None:
        """Before anything happens: whoever reads the log must see that what follows was ordered."""
        generation = self._job.membership.generation if self._job.membership is not None else 0
        fields = {"generation": generation, "fault": order.fault, "node": aim.node, "slot": aim.slot}
        self._record("drill", {**fields, "reason": order.reason})

    async def _strike(self, order: Inject, aim: Aim) -> InjectState:
        """Have the agent strike, and wait until it was done, or cannot be."""
        number, link = next(self._numbers), self._links.get(aim.node)
        if link is None:
            return InjectState(outcome=Outcome.REFUSED, node=aim.node, detail=f"{aim.node} has left the job")
        answered: asyncio.Future[m.Struck | None] = asyncio.get_running_loop().create_future()
        self._ordered[number] = aim.node, answered
        until = self._clock() + order.within_s
        try:
            link.send(m.Strike(number=number, fault=order.fault, slot=aim.slot, reason=order.reason))
            struck = await asyncio.wait_for(answered, order.within_s)
        except asyncio.TimeoutError:
            detail = f"{aim.node} has not answered within {order.within_s:g} s, and may still strike"
            return InjectState(outcome=Outcome.UNSURE, node=aim.node, slot=aim.slot, detail=detail)
        finally:
            del self._ordered[number]
        if struck is None:
            detail = f"the connection of {aim.node} has ended, and it had not said yet that it struck"
            return InjectState(outcome=Outcome.UNSURE, node=aim.node, slot=aim.slot, detail=detail)
        outcome, detail = Outcome.STRUCK, ""
        if struck.refusal:
            outcome, detail = Outcome.UNSURE if struck.pids else Outcome.REFUSED, f"{aim.node}: {struck.refusal}"
        elif aim.slot < 0 and DRILLS[order.fault].fatal and not await self._has_fallen(aim.node, link, until):
            outcome, detail = Outcome.UNSURE, f"{aim.node} was to strike itself, but still speaks"
        return InjectState(outcome=outcome, node=aim.node, slot=aim.slot, pids=struck.pids, detail=detail)

    async def _has_fallen(self, node: NodeId, link: AsyncLink[Any], until: float) -> bool:
        """Whether the node's connection ends, or nothing is heard from it any more, in time."""
        while self._links.get(node) is link and self._job.detector.silence(node, self._clock()) <= self._silent_s:
            if self._clock() >= until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    @property
    def _silent_s(self) -> float:
        return SILENT_BEATS * self._config.timing.heartbeat_s

    def hear(self, node: NodeId, message: m.Struck) -> None:
        """What an agent says it did."""
        ordered, answered = self._ordered.get(message.number, ("", None))
        if answered is not None and ordered == node and not answered.done():
            answered.set_result(message)

    def gone(self, node: NodeId) -> None:
        """The node's connection has ended."""
        for ordered, answered in self._ordered.values():
            if ordered == node and not answered.done():
                answered.set_result(None)


def _itself() -> InjectState:
    return InjectState(outcome=Outcome.STRUCK, pids=(os.getpid(),))
