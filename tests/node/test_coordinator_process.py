"""The coordinator as a process: sockets, event log, restarts. What it decides is tested with the core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from agent_kit import DEADLINE_S, TOKEN, first, play, until

from hotswap.config import CoordinatorConfig, Timing
from hotswap.core import messages as m
from hotswap.core.types import Endpoint
from hotswap.errors import AuthError, PeerUnreachable
from hotswap.node.coordinator import CoordinatorServer
from hotswap.node.eventlog import EventLog
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink


def settings(directory: Path, **changes: Any) -> CoordinatorConfig:
    config = CoordinatorConfig(
        job_id="job",
        token=TOKEN,
        nodes_active=1,
        nodes_max=1,
        nproc_per_node=1,
        timing=Timing(detection_budget_s=2),
        events_path=str(directory / "events.jsonl"),
    )
    return replace(config, **changes)


def events(directory: Path, name: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if name in ("", line["event"])]


@contextlib.asynccontextmanager
async def serving(
    directory: Path, capfd: pytest.CaptureFixture[str], **changes: Any
) -> AsyncIterator[tuple[asyncio.Task[int], int]]:
    """A coordinator in this process, and its port."""
    running = asyncio.create_task(CoordinatorServer(settings(directory, **changes)).run())
    said = ""

    def has_said_port() -> bool:
        nonlocal said
        said += capfd.readouterr().out
        return "port" in said or running.done()

    await until(has_said_port)
    try:
        yield running, json.loads(said)["port"]
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            await asyncio.wait_for(running, DEADLINE_S)


async def join(port: int, node: str = "a#1", token: str = TOKEN, **fields: Any) -> AsyncLink[Any]:
    link = await open_link("127.0.0.1", port, control_codec(), token, DEADLINE_S)
    link.send(m.Register(node=node, fault_domain="", endpoint=Endpoint(host="127.0.0.1", port=1), **fields))
    return link


async def hear(link: AsyncLink[Any], kind: type[Any]) -> Any:
    return await asyncio.wait_for(first(link, kind), DEADLINE_S)


def test_it_says_its_port_forms_a_job_and_tells_everybody_of_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, nodes_active=2, nodes_max=2) as (running, port):
            links = [await join(port, node) for node in ("a#1", "b#1")]
            for link in links:
                assert (await hear(link, m.Fence)).places == ("a#1", "b#1")
            os.kill(os.getpid(), signal.SIGTERM)
            for link in links:
                assert (await hear(link, m.Stop)).exit_code == 143
                link.close()
            assert await running == 143
        assert [e["event"] for e in events(tmp_path)][:4] == [
            "coordinator_started",
            "node_joined",
            "node_joined",
            "job_started",
        ]
        assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600

    play(scenario())


def test_values_are_given_to_whoever_asks_before_or_after(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, nodes_active=2, nodes_max=2) as (_, port):
            early, late = await join(port, "a#1"), await join(port, "b#1")
            for link in (early, late):
                await hear(link, m.Fence)
            early.send(m.KvGet(generation=1, key="k"))
            early.send(m.Heartbeat(generation=1))
            late.send(m.KvSet(generation=1, key="k", value=b"v"))
            assert (await hear(early, m.KvValue)).value == b"v"
            late.send(m.KvGet(generation=1, key="k"))
            assert (await hear(late, m.KvValue)).value == b"v"
            late.send(m.KvGet(generation=0, key="k"))
            late.send(m.KvGet(generation=1, key="k"))
            assert (await hear(late, m.KvValue)).generation == 1
            early.close()
            late.close()

    play(scenario())


def test_a_wrong_token_is_refused_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd) as (_, port):
            with pytest.raises(AuthError):
                await join(port, token="another token that is long enough")
            await until(lambda: events(tmp_path, "connection_refused"))
            link = await join(port)
            assert (await hear(link, m.Fence)).generation == 1, "others are not affected"
            link.close()

    play(scenario())


def test_those_who_are_refused_are_counted_and_cannot_fill_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd) as (_, port):
            for _ in range(17):
                with pytest.raises(AuthError):
                    await join(port, token="another token that is long enough")
            await until(lambda: len(events(tmp_path, "connection_refused")) == 5)
            assert [event["count"] for event in events(tmp_path, "connection_refused")] == [1, 2, 4, 8, 16]

    play(scenario())


@pytest.mark.parametrize(
    ("rude", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8\r\n\r\n", "another protocol"),
        (b"", "no answer in time|nothing was said|handshake"),
    ],
)
def test_strangers_are_refused_and_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rude: bytes, reason: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, timing=Timing(detection_budget_s=0.5)) as (_, port):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(rude)
                await until(lambda: events(tmp_path, "connection_refused"))
                [event] = events(tmp_path, "connection_refused")
                assert re.search(reason, event["reason"]), event
                assert event["peer"] == "{}:{}".format(*sock.getsockname())

    play(scenario())


@pytest.mark.parametrize("frame", ["oversize", "forged", "not a message", "not Register"])
def test_a_peer_that_breaks_the_protocol_is_cut_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], frame: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, nodes_max=2) as (_, port):
            link = await open_link("127.0.0.1", port, control_codec(), TOKEN, DEADLINE_S)
            loop = asyncio.get_running_loop()
            if frame == "oversize":
                await loop.sock_sendall(link._sock, b"\xff\xff\xff\xff")
            elif frame == "forged":
                await loop.sock_sendall(link._sock, b"\0\0\0\1x" + bytes(16))
            elif frame == "not a message":
                await loop.sock_sendall(link._sock, link._writer.frame(b"\xc1"))
            else:
                link.send(m.Heartbeat(generation=0))
            with pytest.raises(PeerUnreachable):
                await asyncio.wait_for(link.receive(), DEADLINE_S)
            assert len(events(tmp_path, "connection_refused")) == 1
            link.close()

    play(scenario())


def test_a_registered_node_that_breaks_the_protocol_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, spare_wait_s=30) as (_, port):
            link = await join(port, protected=True)
            await hear(link, m.Fence)
            await asyncio.get_running_loop().sock_sendall(link._sock, b"\xff\xff\xff\xff")
            await until(lambda: events(tmp_path, "node_lost"))
            assert "limit" in events(tmp_path, "node_lost")[0]["reason"]
            link.close()

    play(scenario())


def test_the_newest_connection_of_a_node_speaks_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, nodes_max=2, timing=Timing(detection_budget_s=10)) as (_, port):
            old = await join(port)
            await until(lambda: events(tmp_path, "node_joined"))
            new = await join(port)
            with pytest.raises(PeerUnreachable):
                while True:
                    await asyncio.wait_for(old.receive(), DEADLINE_S)
            await hear(new, m.Fence)
            assert events(tmp_path, "node_lost") == []
            new.close()

    play(scenario())


def test_silence_costs_a_node_its_connection(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, capfd, timing=Timing(detection_budget_s=0.5), spare_wait_s=0.1) as (running, port):
            link = await join(port)
            with pytest.raises(PeerUnreachable):
                while True:
                    await asyncio.wait_for(link.receive(), DEADLINE_S)
            assert "silent" in events(tmp_path, "node_lost")[0]["reason"]
            assert await running == 75
            link.close()

    play(scenario())


def test_an_event_log_that_cannot_be_written_stops_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        for path in (tmp_path / "no" / "folder" / "events.jsonl", Path("/dev/full")):
            async with serving(tmp_path, capfd, events_path=str(path)) as (_, port):
                link = await join(port)
                assert (await hear(link, m.Fence)).generation == 1
                link.close()

    play(scenario())


def test_an_error_of_its_own_ends_it_so_that_a_new_one_takes_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on with half a transition behind it could tell the agents anything."""

    def fail(*_: object) -> None:
        raise AssertionError("impossible transition")

    async def scenario() -> None:
        async with serving(tmp_path, capfd) as (running, port):
            monkeypatch.setattr("hotswap.core.coordinator.Coordinator.handle", fail)
            link = await join(port)
            with pytest.raises(AssertionError, match="impossible transition"):
                await asyncio.wait_for(running, DEADLINE_S)
            link.close()

    play(scenario())


# --- as a process ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(config: CoordinatorConfig) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "hotswap.node.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as made:
        assert made.stdin is not None
        made.stdin.write(json.dumps(asdict(config)).encode() + b"\n")
        made.stdin.flush()
        try:
            yield made
        finally:
            made.kill()


def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def test_killed_and_started_again_it_goes_on_where_the_job_is(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with process(config) as one:
        port = said(one)["port"]

        async def before() -> None:
            link = await join(port)
            await hear(link, m.Fence)
            one.kill()
            with pytest.raises(PeerUnreachable):
                await asyncio.wait_for(link.receive(), DEADLINE_S)

        play(before())
    with process(replace(config, port=port, restarted=True)) as two:
        assert said(two) == {"port": port}, "the same port, though connections of the old one linger"

        async def after() -> None:
            link = await join(port, generation=1, places=("a#1",), planned=True, training=True, acked={0: 7})
            await asyncio.get_running_loop().run_in_executor(None, wait_for_takeover)
            link.send(m.WorkerFinished(slot=0, generation=1))
            assert (await hear(link, m.Stop)).exit_code == 0
            link.close()

        def wait_for_takeover() -> None:
            end = time.monotonic() + DEADLINE_S
            while not events(tmp_path, "step_committed"):
                assert time.monotonic() < end
                time.sleep(0.005)

        play(after())
        assert said(two) == {"exit_code": 0}
        assert two.wait(DEADLINE_S) == 0
    restarted = [event["restarted"] for event in events(tmp_path, "coordinator_started")]
    assert restarted == [False, True]
    assert not events(tmp_path, "recovery_started")[1:], "training was not disturbed"


def test_generations_that_a_dead_coordinator_announced_are_used_up(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", go_on=True)
    log.write("recovery_started", {"generation": 41})
    log.close()
    with process(settings(tmp_path, restarted=True, timing=Timing(detection_budget_s=0.5))) as made:
        port = said(made)["port"]

        async def scenario() -> None:
            link = await join(port)
            fenced = asyncio.create_task(hear(link, m.Fence))
            # Nodes of the job that was get a moment to come first.
            while not fenced.done():
                link.send(m.Heartbeat(generation=0))
                await asyncio.sleep(0.1)
            assert fenced.result().generation == 42
            link.close()

        play(scenario())


def test_without_a_record_numbers_are_above_all_that_there_can_have_been(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A coordinator before may have announced more than this agent has heard of, and so may each one that had no log either."""

    async def scenario() -> None:
        numbers = [4]
        for log in ("one", "two"):
            (tmp_path / log).mkdir()
            async with serving(tmp_path / log, capfd) as (_, port):
                link = await join(port, generation=4, places=("a#1",), planned=True)
                numbers.append((await hear(link, m.Fence)).generation)
                link.close()
        assert 4 < numbers[1] < numbers[2] <= 1000 * time.time()
        # With the log nothing is left to guess.
        async with serving(tmp_path / "two", capfd, restarted=True) as (_, port):
            link = await join(port, generation=numbers[2], places=("a#1",), planned=True)
            assert (await hear(link, m.Fence)).generation <= numbers[2] + 2
            link.close()

    play(scenario())


def test_a_coordinator_that_did_not_run_blames_nobody_for_silence(tmp_path: Path) -> None:
    budget_s = 0.5
    with process(settings(tmp_path, nodes_max=2, timing=Timing(detection_budget_s=budget_s))) as made:
        port = said(made)["port"]

        async def scenario() -> None:
            one, two = await join(port), await join(port, "b#1")

            async def beat() -> None:
                while True:
                    for link in (one, two):
                        link.send(m.Heartbeat(generation=0))
                    await asyncio.sleep(budget_s / 5)

            beating = asyncio.create_task(beat())
            await hear(two, m.Fence)
            made.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3 * budget_s)
            made.send_signal(signal.SIGCONT)
            # It is awake again when it answers.
            one.send(m.KvGet(generation=1, key="k"))
            two.send(m.KvSet(generation=1, key="k", value=b"v"))
            assert (await hear(one, m.KvValue)).value == b"v"
            assert events(tmp_path, "node_lost") == []
            beating.cancel()
            await until(lambda: events(tmp_path, "node_lost"))
            one.close()
            two.close()

        play(scenario())


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(settings(tmp_path, port=port)) as made:
            assert f"127.0.0.1:{port}" in said(made)["error"]
            assert made.wait(DEADLINE_S) == 75


# --- event log ---------------------------------------------------------------------------------------------------------


def test_a_new_job_puts_an_old_log_aside(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(3):
        log = EventLog(path, go_on=False)
        assert list(log.read()) == []
        log.write("event", {"number": number})
        log.close()
    numbers = {p.name: json.loads(p.read_text())["number"] for p in tmp_path.iterdir()}
    assert numbers == {"events.jsonl": 2, "events-1.jsonl": 0, "events-2.jsonl": 1}


def test_a_line_that_a_crash_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "one"}\n{"event": "tw')
    log = EventLog(path, go_on=True)
    log.write("three", {})
    assert [record["event"] for record in log.read()] == ["one", "three"]
    log.close()
