"""What the coordinator does with operators' commands, each of which comes on a connection of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from hotswap.core import messages as m
from hotswap.core.commands import Drain, DrainState, Inject
from hotswap.core.job import Job
from hotswap.core.types import NodeId, host_of
from hotswap.node.drills import Drills
from hotswap.node.leadership import Leadership
from hotswap.wire.links import FLUSH_S, AsyncLink

Order = Union[Drain, Inject]


class Orders:
    """One coordinator's. All methods run on its event loop."""

    def __init__(
        self, job: Job, links: Mapping[NodeId, AsyncLink[Any]], drills: Drills, leadership: Leadership | None
    ) -> None:
        """*links* are those of agents, as they come and go. *leadership*: there are other coordinators too."""
        self._job = job
        self._links = links
        self._drills = drills
        self._leadership = leadership

    async def obey(self, order: Order, operator: AsyncLink[Any]) -> None:
        """Do what *order* says, and answer it; one that has to look elsewhere, or again, is told so."""
        leadership = self._leadership
        if leadership is not None and not leadership.holds:
            await self._send_away(operator)
        elif isinstance(order, Inject):
            # Whom it means is not known before the nodes are.
            await (self._send_away(operator) if self._job.hears_nodes else self._drills.carry_out(order, operator))
        else:
            await self._drain(order, operator)

    async def _drain(self, order: Drain, operator: AsyncLink[Any]) -> None:
        """The agent keeps what it is told, so that it outlives this coordinator."""
        named = [node for node in self._links if order.node in (node, host_of(node))]
        if not named and self._job.hears_nodes:
            await self._send_away(operator)
            return
        for node in named:
            self._links[node].send(m.DrainNode(reason=order.reason))
        operator.send(DrainState(state="draining" if named else "absent", nodes=tuple(sorted(self._links))))
        await operator.flush(FLUSH_S)

    async def _send_away(self, operator: AsyncLink[Any]) -> None:
        """Nobody leads who could answer: this coordinator not any more, or not yet."""
        operator.send(m.Follow(term=self._leadership.term if self._leadership is not None else 0))
        await operator.flush(FLUSH_S)
