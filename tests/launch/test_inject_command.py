"""``hotswap inject`` against a coordinator that is one, and an agent that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from command_kit import TOKEN, coordinator_of_job, port_of

from hotswap.cli import main
from hotswap.core import messages as m
from hotswap.core.types import Endpoint
from hotswap.errors import HotswapError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link


class Agent(threading.Thread):
    """Says what it is given to whoever orders a strike."""

    def __init__(self, logs: Path, **answer: Any) -> None:
        super().__init__(daemon=True)
        self.port = port_of(logs)
        self.answer = answer
        self.registered = threading.Event()
        self.told: list[m.Strike] = []

    def __enter__(self) -> Agent:
        self.start()
        assert self.registered.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self) -> None:
        with contextlib.suppress(HotswapError):
            asyncio.run(self.serve())

    async def serve(self) -> None:
        link = await open_link("127.0.0.1", self.port, control_codec(), TOKEN, 10.0)
        link.send(m.Register(node="a#1", fault_domain="", endpoint=Endpoint(host="127.0.0.1", port=1)))
        await link.flush(10.0)
        self.registered.set()
        while True:
            message = await link.receive()
            if isinstance(message, m.Strike):
                self.told.append(message)
                link.send(m.Struck(number=message.number, **self.answer))


def test_what_was_struck_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator_of_job(tmp_path, nodes=2, allow_inject=True), Agent(tmp_path, pids=(41, 42)) as agent:
        assert main(["inject", str(tmp_path), "drain", "--node", "a"]) == 0
        assert capsys.readouterr().out == "a node is told to leave, as by a scheduler: a#1, processes 41, 42\n"
        assert main(["inject", str(tmp_path), "drain", "--node", "a#1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "fault": "drain",
            "outcome": "struck",
            "node": "a#1",
            "slot": -1,
            "pids": [41, 42],
            "detail": "",
        }
    assert [order.reason.partition(" by ")[0] for order in agent.told] == ["hotswap inject"] * 2


def test_the_coordinator_is_gone_when_the_command_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator_of_job(tmp_path, nodes=2, allow_inject=True) as process:
        assert main(["inject", str(tmp_path), "coordinator"]) == 0
        assert process.wait(10) == -9
    assert capsys.readouterr().out == f"the coordinator is killed: the coordinator, process {process.pid}\n"


def test_what_is_not_known_is_said_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        coordinator_of_job(tmp_path, nodes=2, allow_inject=True),
        Agent(tmp_path, pids=(41,), refusal="process 41 hangs"),
    ):
        assert main(["inject", str(tmp_path), "drain", "--node", "a"]) == 1
    said = capsys.readouterr().out
    assert said == "a#1, process 41: a#1: process 41 hangs; look at the event log before you try again\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "--slot", "0"], "no slot has a place while the job is forming; try again when it trains"),
        (["node", "--node", "b"], "there is no node 'b': --node, one of none"),
    ],
)
def test_a_victim_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with coordinator_of_job(tmp_path, nodes=2, allow_inject=True):
        assert main(["inject", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_job_that_was_not_started_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator_of_job(tmp_path, nodes=2, allow_inject=False) as process:
        assert main(["inject", str(tmp_path), "coordinator"]) == 2
        assert process.poll() is None
    assert "they need --allow-inject, on 'hotswap run'" in capsys.readouterr().err


def test_another_jobs_token_is_refused_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator_of_job(tmp_path, nodes=2, allow_inject=True):
        (tmp_path / "token").write_text("f" * 32)
        assert main(["inject", str(tmp_path), "coordinator"]) == 1
        assert "token" in capsys.readouterr().err
        # It has been counted when the next one is answered.
        (tmp_path / "token").write_text(TOKEN)
        assert main(["inject", str(tmp_path), "node", "--node", "b"]) == 2
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len([line for line in lines if "connection_refused" in line]) == 1
    assert not [line for line in lines if '"drill"' in line]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker"], "worker needs --slot"),
        (["stop-node"], "stop-node needs --node"),
        (["coordinator", "--wait", "nan"], "--wait nan: a number of seconds above 0"),
        (["coordinator"], "is not the log directory of a running job"),
    ],
)
def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["inject", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
