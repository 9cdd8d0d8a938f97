"""Which orders of operators a coordinator obeys, and when it sends them on."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_kit import DEADLINE_S, TOKEN, play, until

from hotswap.config import CoordinatorConfig
from hotswap.core import messages as m
from hotswap.core.commands import Drain, DrainState, Inject, InjectState
from hotswap.core.types import Endpoint
from hotswap.node.accept import accept_all, listen
from hotswap.node.coordinator import CoordinatorServer
from hotswap.node.eventlog import EventLog
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

DRAIN = Drain(node="a", reason="a test")
INJECT = Inject(fault="node", node="a", reason="a test", within_s=1.0)


class Deposed:
    """A leadership that is over."""

    term, holds = 7, False


async def link_to(port: int, message: Any) -> AsyncLink[Any]:
    link = await open_link("127.0.0.1", port, control_codec(), TOKEN, DEADLINE_S)
    link.send(message)
    return link


async def asked(port: int, order: Any) -> Any:
    link = await link_to(port, order)
    try:
        return await asyncio.wait_for(link.receive(), DEADLINE_S)
    finally:
        link.close()


def register(node: str, generation: int, *places: str) -> m.Register:
    endpoint = Endpoint(host="127.0.0.1", port=1)
    return m.Register(node=node, fault_domain="", endpoint=endpoint, generation=generation, places=places)


def config_of(directory: Path, *, restarted: bool) -> CoordinatorConfig:
    return CoordinatorConfig(
        job_id="job", token=TOKEN, restarted=restarted, nodes_active=2, nodes_max=2, nproc_per_node=1, allow_inject=True,
        events_path=str(directory / "events.jsonl"),
    )  # fmt: skip


@pytest.mark.parametrize("order", [DRAIN, INJECT], ids=["drain", "inject"])
def test_one_that_leads_no_more_decides_nothing(tmp_path: Path, order: Any) -> None:
    async def scenario() -> None:
        server = CoordinatorServer(config_of(tmp_path, restarted=False))
        server.orders._leadership = Deposed()  # type: ignore[assignment]
        with listen(server.config) as listener:
            accepting = asyncio.create_task(accept_all(listener, server.serve))
            leading = asyncio.create_task(server.lead())
            port = listener.getsockname()[1]
            a = await link_to(port, register("a#1", 0))
            await until(lambda: "a#1" in server.links)
            assert await asked(port, order) == m.Follow(term=7)
            server.ask_to_stop(signal.SIGTERM)
            heard: list[Any] = []
            while not heard or not isinstance(heard[-1], m.Stop):
                heard.append(await asyncio.wait_for(a.receive(), DEADLINE_S))
            assert not any(isinstance(message, (m.DrainNode, m.Strike)) for message in heard)
            await leading
            accepting.cancel()
            a.close()

    play(scenario())


def test_one_that_has_taken_over_asks_to_wait_until_it_has_heard_the_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path / "events.jsonl", go_on=False)
        log.write("recovery_planned", {"generation": 1, "resume_step": 0})
        log.close()
        server = CoordinatorServer(config_of(tmp_path, restarted=True))
        with listen(server.config) as listener:
            accepting = asyncio.create_task(accept_all(listener, server.serve))
            leading = asyncio.create_task(server.lead())
            port = listener.getsockname()[1]
            later = m.Follow(term=0)
            assert await asked(port, DRAIN) == await asked(port, INJECT) == later, "it has heard nobody"
            b = await link_to(port, register("b#1", 1, "a#1", "b#1"))
            await until(lambda: "b#1" in server.links)
            assert await asked(port, DRAIN) == await asked(port, INJECT) == later, "it has not heard a"
            assert await asked(port, Drain(node="b", reason="a test")) == DrainState(state="draining", nodes=("b#1",))
            a = await link_to(port, register("a#1", 1, "a#1", "b#1"))
            await until(lambda: not server.machine.job.hears_nodes)
            gone = Drain(node="c", reason="a test")
            assert await asked(port, gone) == DrainState(state="absent", nodes=("a#1", "b#1"))
            assert isinstance(await asked(port, replace(INJECT, node="c")), InjectState)
            for link in (a, b):
                link.close()
            server.ask_to_stop(signal.SIGTERM)
            await leading
            accepting.cancel()

    play(scenario())
