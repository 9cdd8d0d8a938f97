"""Several coordinators and one agent, over real connections; the store is in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_kit import DEADLINE_S, TOKEN, first, play, settings, until

from hotswap.config import CoordinatorConfig, StoreConfig, Timing
from hotswap.core import messages as m
from hotswap.core.past import Past
from hotswap.core.types import Endpoint
from hotswap.errors import PeerUnreachable
from hotswap.node.accept import accept_all, open_listener
from hotswap.node.candidate import Candidate
from hotswap.node.control import ControlChannel
from hotswap.node.coordinator import CoordinatorServer
from hotswap.node.leadership import Ballot, Leadership
from hotswap.store.memory import MemoryStore
from hotswap.store.table import Table
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import accept_link, open_link
from hotswap.wire.links import AsyncLink


class Quick(Timing):
    """Leases that a test can wait for."""

    def __post_init__(self) -> None:
        pass

    @property
    def lease_s(self) -> float:
        return 1.2

    @property
    def connect_s(self) -> float:
        return 1.0


REGISTER = m.Register(node="a#1", fault_domain="", endpoint=Endpoint(host="127.0.0.1", port=1))


class Process:
    """A coordinator as its process would be, without signals."""

    def __init__(self, directory: Path, table: Table) -> None:
        config = CoordinatorConfig(
            job_id="job",
            token=TOKEN,
            nodes_active=1,
            nodes_max=1,
            nproc_per_node=1,
            timing=Quick(),
            events_path=str(directory / "events.jsonl"),
            store=StoreConfig(kind="memory", urls=()),
        )
        self.candidate = Candidate(config, MemoryStore(table), CoordinatorServer)
        self.listener = open_listener("127.0.0.1", 0)
        self.port = int(self.listener.getsockname()[1])
        self.accepting = asyncio.create_task(accept_all(self.listener, self.candidate.serve))
        self.life = asyncio.create_task(self.candidate.live(("127.0.0.1", self.port)))

    @property
    def leads(self) -> bool:
        return self.candidate.server is not None

    async def crash(self) -> None:
        for task in (self.accepting, self.life):
            task.cancel()
        await asyncio.gather(self.accepting, self.life, return_exceptions=True)
        self.listener.close()


@contextlib.asynccontextmanager
async def processes(directory: Path, table: Table) -> AsyncIterator[tuple[Process, Process]]:
    """The first one leads."""
    leader = Process(directory, table)
    await until(lambda: leader.leads)
    standby = Process(directory, table)
    try:
        yield leader, standby
    finally:
        await leader.crash()
        await standby.crash()


async def link_to(port: int) -> AsyncLink[Any]:
    link = await open_link("127.0.0.1", port, control_codec(), TOKEN, DEADLINE_S)
    link.send(REGISTER)
    return link


async def beat(link: AsyncLink[Any]) -> None:
    while True:
        link.send(m.Heartbeat(generation=0))
        await asyncio.sleep(0.2)


def test_a_leader_says_its_term_and_another_one_sends_agents_to_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, Table()) as (leader, standby):
            link = await link_to(leader.port)
            assert await link.receive() == m.Lead(term=1)
            assert (await first(link, m.Fence)).generation == 1
            assert await first(link, m.Lead) == m.Lead(term=1), "it says so again and again"
            await asyncio.sleep(2 * Quick().lease_beat_s)
            asked = await link_to(standby.port)
            assert await asked.receive() == m.Follow(term=1, host="127.0.0.1", port=leader.port)
            with pytest.raises(PeerUnreachable):
                await asked.receive()
            link.close()

    play(scenario())


def test_when_the_leader_is_gone_the_other_one_goes_on_with_what_was_decided(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, Table()) as (leader, standby):
            link = await link_to(leader.port)
            assert (await first(link, m.Fence)).generation == 1
            await leader.crash()
            link.close()
            await until(lambda: standby.leads)
            link = await link_to(standby.port)
            assert await link.receive() == m.Lead(term=2)
            beating = asyncio.create_task(beat(link))
            # The agent says that it knows of no generation; the number is used up all the same.
            assert (await first(link, m.Fence)).generation == 2
            beating.cancel()
            link.close()

    play(scenario())


def test_an_end_that_the_leader_could_not_tell_any_more_is_told_by_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        table = Table()
        ballot = Ballot(MemoryStore(table), "job", ("127.0.0.1", 1), Quick(), asyncio.get_running_loop().time)
        await ballot.enter(restarted=False)
        leadership = await ballot.look()
        assert isinstance(leadership, Leadership)
        standby = Process(tmp_path, table)
        await asyncio.sleep(2 * Quick().lease_beat_s)
        await leadership.commit(Past(generation=1, exit_code=3, reason="that was it"))
        stop = None
        while stop is None:
            link = await link_to(standby.port)
            with contextlib.suppress(PeerUnreachable):
                stop = await asyncio.wait_for(first(link, m.Stop), DEADLINE_S)
            link.close()
            await asyncio.sleep(0.05)
        assert stop == m.Stop(exit_code=3, reason="that was it")
        assert await asyncio.wait_for(standby.life, DEADLINE_S) == 3
        await standby.crash()

    play(scenario())


# --- the agent's side ---------------------------------------------------------------------------------------------------


class Scripted:
    """A coordinator that says what a test wants."""

    def __init__(self) -> None:
        self.listener = open_listener("127.0.0.1", 0)
        self.address = ("127.0.0.1", int(self.listener.getsockname()[1]))
        self.links: list[AsyncLink[Any]] = []

    async def meet(self) -> AsyncLink[Any]:
        sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        link = await accept_link(sock, control_codec(), TOKEN, DEADLINE_S)
        self.links.append(link)
        assert isinstance(await link.receive(), m.Register)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.listener.close()


@contextlib.asynccontextmanager
async def agent_of(directory: Path, one: Scripted, two: Scripted) -> AsyncIterator[tuple[ControlChannel, list[Any]]]:
    config = settings(directory, coordinator_port=one.address[1], coordinators=(two.address,), timing=Quick())
    heard: list[Any] = []
    channel = ControlChannel(replace(config), lambda: REGISTER, heard.append)
    running = asyncio.create_task(channel.run())
    try:
        yield channel, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        one.close()
        two.close()


STOP = m.Stop(exit_code=9, reason="")


def test_an_agent_obeys_only_who_leads_and_says_everything_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Scripted(), Scripted()
        async with agent_of(tmp_path, one, two) as (channel, heard):
            link = await one.meet()
            channel.send(m.WorkerFinished(slot=0, generation=1))
            assert await link.receive() == m.WorkerFinished(slot=0, generation=1), "it may turn out to lead"
            link.send(STOP)
            await asyncio.sleep(0.05)
            assert heard == [] and channel.alone_s > 0
            link.send(m.Lead(term=3))
            link.send(m.Go(generation=1))
            await until(lambda: heard == [m.Go(generation=1)])
            assert channel.alone_s == 0
            link.close()

    play(scenario())


def test_an_agent_goes_where_it_is_sent_and_refuses_a_term_that_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Scripted(), Scripted()
        async with agent_of(tmp_path, one, two) as (_, heard):
            link = await one.meet()
            link.send(m.Lead(term=3))
            link.send(m.Follow(term=4, host=two.address[0], port=two.address[1]))
            link = await two.meet()
            link.send(m.Lead(term=4))
            link.send(m.Go(generation=1))
            await until(lambda: heard == [m.Go(generation=1)])
            link.close()
            link = await one.meet()
            link.send(m.Lead(term=3))
            link.send(STOP)
            with pytest.raises(PeerUnreachable):
                await first(link, m.Stop)
            assert heard == [m.Go(generation=1)]

    play(scenario())


def test_an_agent_leaves_a_leader_that_says_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Scripted(), Scripted()
        async with agent_of(tmp_path, one, two) as (_, heard):
            silent = await one.meet()
            silent.send(m.Lead(term=1))
            link = await asyncio.wait_for(two.meet(), DEADLINE_S)
            link.send(m.Lead(term=2))
            silent.send(STOP)
            link.send(m.Go(generation=1))
            await until(lambda: bool(heard))
            assert heard == [m.Go(generation=1)]
            for each in (silent, link):
                each.close()

    play(scenario())
