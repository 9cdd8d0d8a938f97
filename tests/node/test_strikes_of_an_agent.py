"""An agent that is told to strike its own processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent_kit import Bench, Worker, bench, holder, play

from hotswap.config import Timing
from hotswap.core import messages as m
from hotswap.node.strikes import group_members

Patch = pytest.MonkeyPatch
PID = 4242


async def trained(it: Bench, tmp_path: Path) -> Worker:
    it.peer = holder(tmp_path)
    worker = await it.training_worker()
    it.spawner.pid_of_all = PID
    return worker


async def answer(it: Bench, fault: str, slot: int = -1) -> m.Struck:
    it.tell(m.Strike(number=7, fault=fault, slot=slot, reason="a test"))
    return await it.hear(m.Struck)


@pytest.mark.parametrize(
    ("fault", "number"),
    [("worker", signal.SIGKILL), ("segv-worker", signal.SIGSEGV), ("abort-worker", signal.SIGABRT)],
)
def test_a_worker_is_struck_and_its_end_is_waited_for(
    tmp_path: Path, monkeypatch: Patch, fault: str, number: int
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, allow_inject=True) as it:
            worker = await trained(it, tmp_path)
            it.tell(m.Strike(number=7, fault=fault, slot=0, reason="a test"))
            # An ordinary loss, told as soon as it is known.
            assert (await it.hear(m.WorkerLost)).status == -number
            assert await it.hear(m.Struck) == m.Struck(number=7, pids=(PID,))
            assert worker.signals == [number]

    play(scenario())


def test_a_worker_is_stopped(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario(process: subprocess.Popen[bytes]) -> None:
        async with bench(tmp_path, monkeypatch, allow_inject=True) as it:
            worker = await trained(it, tmp_path)
            it.spawner.obeys_sigterm, it.spawner.pid_of_all = False, process.pid
            it.tell(m.Strike(number=7, fault="stop-worker", slot=0, reason="a test"))
            await it.silent(m.Struck)
            assert worker.signals == [signal.SIGSTOP]
            process.send_signal(signal.SIGSTOP)
            assert await it.hear(m.Struck) == m.Struck(number=7, pids=(process.pid,))
            it.spawner.obeys_sigterm = True

    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            play(scenario(process))
        finally:
            process.kill()


def test_a_worker_that_does_not_end_is_said(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        timing = Timing(detection_budget_s=0.5)
        async with bench(tmp_path, monkeypatch, allow_inject=True, timing=timing) as it:
            await trained(it, tmp_path)
            it.spawner.obeys_sigterm = False
            struck = await answer(it, "segv-worker", slot=0)
            assert struck.pids == (PID,) and struck.refusal == f"process {PID} got SIGSEGV, which has had no effect yet"
            it.spawner.obeys_sigterm = True

    play(scenario())


@pytest.mark.parametrize(
    ("allowed", "fault", "said"),
    [
        (False, "worker", "they need --allow-inject"),
        (True, "worker", "slot 3 has no process just now"),
        (True, "meteor", "knows no fault 'meteor'"),
        (True, "node", "leads no process group"),
    ],
)
def test_what_it_refuses(tmp_path: Path, monkeypatch: Patch, allowed: bool, fault: str, said: str) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, allow_inject=allowed) as it:
            monkeypatch.setattr("hotswap.node.strikes.os.getpgrp", lambda: os.getpid() + 1)
            monkeypatch.setattr("hotswap.node.strikes.os.killpg", lambda *_: pytest.fail("nobody is to be struck"))
            await it.register()
            struck = await answer(it, fault, slot=3)
            assert not struck.pids and said in struck.refusal

    play(scenario())


def test_a_worker_that_is_only_being_started_is_none(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, allow_inject=True) as it:
            worker = await it.built_worker()
            assert "has no process just now" in (await answer(it, "worker", slot=0)).refusal
            assert worker.signals == []

    play(scenario())


@pytest.mark.parametrize(
    ("fault", "call", "number"),
    [
        ("node", "killpg", signal.SIGKILL),
        ("stop-node", "killpg", signal.SIGSTOP),
        ("agent", "kill", signal.SIGKILL),
        ("drain", "kill", signal.SIGUSR1),
    ],
)
def test_it_strikes_itself_after_it_has_said_so(
    tmp_path: Path, monkeypatch: Patch, fault: str, call: str, number: int
) -> None:
    async def scenario() -> None:
        struck: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr("hotswap.node.strikes.os.getpgrp", os.getpid)
        async with bench(tmp_path, monkeypatch, allow_inject=True) as it:
            await it.register()
            # Only until the agent has struck: others signal processes too.
            with monkeypatch.context() as patch:
                patch.setattr(f"hotswap.node.strikes.os.{call}", lambda *what: struck.set_result(what))
                said = await answer(it, fault)
                assert await asyncio.wait_for(struck, 10) == (os.getpid(), number)
            assert said.pids[0] == os.getpid() and not said.refusal

    monkeypatch.setattr("hotswap.node.strikes.group_members", lambda leader: [leader, PID])
    play(scenario())


def asleep(group: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, group))  # noqa: PLW1509 (one thread)


def test_the_members_of_a_group() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(asleep(0))
        stack.callback(first.kill)
        second = stack.enter_context(asleep(first.pid))
        stack.callback(second.kill)
        assert group_members(first.pid) == [first.pid, second.pid]
        assert group_members(second.pid) == []
