"""An operator's order on its way through the coordinator to an agent, and the answer back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import DEADLINE_S, TOKEN, first, play, until

from hotswap.config import CoordinatorConfig, Timing
from hotswap.core import messages as m
from hotswap.core.commands import Inject, InjectState, Outcome
from hotswap.core.types import Endpoint
from hotswap.errors import AuthError, PeerUnreachable
from hotswap.launch.command import Target, ask
from hotswap.node.accept import accept_all, listen
from hotswap.node.coordinator import CoordinatorServer
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink


class Kit:
    """A coordinator in this process, and what is asked of it."""

    def __init__(self, directory: Path, server: CoordinatorServer, port: int) -> None:
        self.directory, self.server, self.port = directory, server, port

    async def join(self, node: str) -> AsyncLink[Any]:
        link = await open_link("127.0.0.1", self.port, control_codec(), TOKEN, DEADLINE_S)
        link.send(m.Register(node=node, fault_domain="", endpoint=Endpoint(host="127.0.0.1", port=1)))
        await until(lambda: node in self.server.links)
        return link

    async def order(self, fault: str = "node", token: str = TOKEN, within_s: float = 5.0, **victim: Any) -> InjectState:
        target = Target(coordinators=(("127.0.0.1", self.port),), token=token, takeover_s=1.0)
        command = Inject(fault=fault, reason="a test", within_s=within_s, **{"node": "a", **victim})
        return await ask(target, command, InjectState, patience_s=DEADLINE_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == name]


@contextlib.asynccontextmanager
async def coordinator(directory: Path, *, allow_inject: bool = True, budget_s: float = 2.0) -> AsyncIterator[Kit]:
    config = CoordinatorConfig(
        job_id="job", token=TOKEN, nodes_active=2, nodes_max=3, nproc_per_node=1, timing=Timing(detection_budget_s=budget_s),
        events_path=str(directory / "events.jsonl"), allow_inject=allow_inject,
    )  # fmt: skip
    server = CoordinatorServer(config)
    with listen(config) as listener:
        accepting = asyncio.create_task(accept_all(listener, server.serve))
        leading = asyncio.create_task(server.lead())
        try:
            yield Kit(directory, server, listener.getsockname()[1])
        finally:
            server.ask_to_stop(signal.SIGTERM)
            await asyncio.wait_for(leading, DEADLINE_S)
            accepting.cancel()


async def told(link: AsyncLink[Any]) -> m.Strike:
    return await asyncio.wait_for(first(link, m.Strike), DEADLINE_S)


def test_the_order_reaches_the_node_and_its_answer_the_operator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a, b = await it.join("a#1"), await it.join("b#1")
            asked = asyncio.create_task(it.order("drain", node="b"))
            strike = await told(b)
            assert (strike.fault, strike.slot, strike.reason) == ("drain", -1, "a test")
            # Only the node that was told can answer, and only what it was asked.
            a.send(m.Struck(number=strike.number, pids=(1,)))
            b.send(m.Struck(number=strike.number + 1, pids=(2,)))
            b.send(m.Struck(number=strike.number, pids=(3, 4)))
            b.send(m.Struck(number=strike.number, pids=(5,)))
            assert await asked == InjectState(outcome=Outcome.STRUCK, node="b#1", pids=(3, 4))
            [drill] = it.events("drill")
            assert (drill["fault"], drill["node"], drill["reason"]) == ("drain", "b#1", "a test")
            a.close()
            b.close()

    play(scenario())


def test_it_is_in_the_log_before_anybody_is_struck(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            asked = asyncio.create_task(it.order())
            await told(a)
            assert it.events("drill") and not asked.done()
            a.close()
            await asked

    play(scenario())


@pytest.mark.parametrize("how", ["its connection ends", "it falls silent"])
def test_a_node_that_strikes_itself_is_waited_for(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path, budget_s=2.0 if how == "it falls silent" else 60.0) as it:
            a = await it.join("a#1")
            asked = asyncio.create_task(it.order("stop-node" if how == "it falls silent" else "node"))
            strike = await told(a)
            for _ in range(3):
                a.send(m.Heartbeat(generation=0))
                await asyncio.sleep(0.05)
            a.send(m.Struck(number=strike.number, pids=(9,)))
            await asyncio.sleep(0.2)
            assert not asked.done(), "it may still be alive"
            if how == "its connection ends":
                a.close()
            assert await asked == InjectState(outcome=Outcome.STRUCK, node="a#1", pids=(9,))
            a.close()

    play(scenario())


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("nothing", "a#1 has not answered within 0.5 s, and may still strike"),
        ("leaves", "the connection of a#1 has ended, and it had not said yet"),
        ("lives on", "a#1 was to strike itself, but still speaks"),
        ("fails", "a#1: process 9 got SIGKILL, which has had no effect yet"),
    ],
)
def test_what_is_not_known_to_have_been_done_is_said(tmp_path: Path, does: str, said: str) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            asked = asyncio.create_task(it.order(within_s=0.5))
            strike = await told(a)
            if does == "leaves":
                a.close()
            elif does != "nothing":
                refusal = said.removeprefix("a#1: ") if does == "fails" else ""
                a.send(m.Struck(number=strike.number, pids=(9,), refusal=refusal))
            while not asked.done():
                if does == "lives on":
                    a.send(m.Heartbeat(generation=0))
                await asyncio.sleep(0.05)
            answer = await asked
            assert answer.outcome is Outcome.UNSURE and said in answer.detail
            a.close()

    play(scenario())


def test_what_the_node_refuses_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            asked = asyncio.create_task(it.order())
            a.send(m.Struck(number=(await told(a)).number, refusal="not started for drills"))
            assert await asked == InjectState(outcome=Outcome.REFUSED, node="a#1", detail="a#1: not started for drills")
            a.close()

    play(scenario())


@pytest.mark.parametrize(
    ("prepare", "order", "said"),
    [
        (lambda it: None, {"node": "c"}, "there is no node 'c': --node, one of a#1"),
        (lambda it: None, {"within_s": math.nan}, "a drill takes between 0 and 3600 s"),
        (lambda it: None, {"within_s": math.inf}, "a drill takes between 0 and 3600 s"),
        # Its end is news to the connection, but not yet to the machine.
        (lambda it: it.server.links.pop("a#1"), {}, "a#1 has left the job"),
    ],
    ids=["nobody", "no time", "all the time", "on its way out"],
)
def test_what_is_refused_without_asking_a_node(
    tmp_path: Path, prepare: Callable[[Kit], Any], order: dict[str, Any], said: str
) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            prepare(it)
            answer = await it.order(**order)
            assert answer.outcome is Outcome.REFUSED and said in answer.detail
            a.close()

    play(scenario())


def test_a_job_that_does_not_allow_drills_has_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path, allow_inject=False) as it:
            a = await it.join("a#1")
            answer = await it.order()
            assert answer.outcome is Outcome.REFUSED and "--allow-inject" in answer.detail
            assert it.events("drill") == []
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(first(a, m.Strike), 0.1)
            a.close()

    play(scenario())


def test_another_jobs_token_is_refused_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            with pytest.raises(AuthError):
                await it.order(token="f" * 32)
            await until(lambda: it.events("connection_refused"))
            assert it.events("drill") == []
            a.close()

    play(scenario())


def test_the_coordinator_ends_itself_when_it_has_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            with monkeypatch.context() as patch:
                killed: list[tuple[int, int]] = []
                patch.setattr("hotswap.node.drills.os.kill", lambda *what: killed.append(what))
                answer = await it.order("coordinator", node="")
            assert answer == InjectState(outcome=Outcome.STRUCK, pids=(os.getpid(),))
            assert killed == [(os.getpid(), signal.SIGKILL)]
            assert it.events("drill")[0]["node"] == ""

    play(scenario())


def test_a_coordinator_that_hangs_up_has_not_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(tmp_path) as it:
            a = await it.join("a#1")
            asked = asyncio.create_task(it.order())
            await told(a)
            it.server.ask_to_stop(signal.SIGTERM)
            with contextlib.suppress(PeerUnreachable):
                assert (await asked).outcome is not Outcome.STRUCK
            a.close()

    play(scenario())
