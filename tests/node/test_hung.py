"""A worker that keeps others waiting: what its agent passes on of it, asks it, and does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Worker as ScriptedWorker
from agent_kit import bench, holder, play, until

from hotswap.config import Timing
from hotswap.core import messages as m
from hotswap.core.progress import GroupProgress, Progress
from hotswap.session.settings import STACKS_SIGNAL
from hotswap.wire import worker_messages as w

QUICK = Timing(detection_budget_s=0.5)
END = m.EndHung(generation=1, slot=0, reason="slot 0 has not entered operation 4 of dp")


def said(step: int = 0, generation: int = 1, **fields: Any) -> w.Progressed:
    progress = Progress(**{"step": step, "phase": "script", "issued": 3, "gate": 1, **fields})
    return w.Progressed(generation=generation, progress=progress)


def test_progress_travels_with_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=QUICK) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            worker.say(said(generation=7))
            worker.say(said(groups={"dp": GroupProgress(members=(0, 1), issued=3)}, waits=True, at="train.py:3 step"))
            beat = await it.hear(m.Heartbeat)
            while not beat.progress:
                beat = await it.hear(m.Heartbeat)
            progress = beat.progress[0]
            assert (progress.issued, progress.waits, progress.groups["dp"].issued) == (3, True, 3)
            while beat.progress[0].mute_s == 0.0:
                beat = await it.hear(m.Heartbeat)
            it.fence(2)
            while beat.generation == 1:
                beat = await it.hear(m.Heartbeat)
            assert not beat.progress, "what it was in a generation that is over"

    play(scenario())


@pytest.mark.parametrize("advances", [False, True])
def test_stacks_are_taken_before_it_is_ended(advances: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            worker.say(said())

            def on_stacks(asked: ScriptedWorker) -> None:
                os.write(asked.stacks, b"Thread 1\n  in lock\n")
                if advances:
                    asked.say(said(step=1))

            it.spawner.on_stacks = on_stacks
            await until(lambda: it.agent.workers[0].progressed)
            it.tell(m.EndHung(generation=9, slot=0, reason="another generation"))
            it.tell(m.EndHung(generation=1, slot=5, reason="nobody here"))
            it.tell(END)
            assert await it.hear(m.WorkerStacks) == m.WorkerStacks(slot=0, generation=1, stacks="Thread 1\n  in lock\n")
            if advances:
                assert worker.signals == [STACKS_SIGNAL]
                return
            lost = await it.hear(m.WorkerLost)
            assert (lost.slot, lost.status, lost.detail) == (0, -9, f"hung: {END.reason}")
            assert worker.signals == [STACKS_SIGNAL, signal.SIGKILL]

    play(scenario())


@pytest.mark.parametrize(("answer", "said"), [("echo spied", "spied\n"), ("exit 1", ""), (None, "")])
def test_one_that_does_not_answer_is_looked_at_from_outside_where_that_can_be_done(
    answer: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotswap.node.hung.ANSWER_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    if answer is not None:
        (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "py-spy").chmod(0o755)

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            await it.training_worker()
            it.spawner.pid_of_all = 4711
            it.tell(END)
            assert (await it.hear(m.WorkerStacks)).stacks == said
            assert (await it.hear(m.WorkerLost)).status == -9

    play(scenario())


def test_one_that_ends_while_it_is_asked_is_an_ordinary_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            await it.training_worker()
            it.spawner.on_stacks = lambda asked: it.spawner.end(asked, -11)
            it.tell(END)
            lost = await it.hear(m.WorkerLost)
            assert (lost.status, lost.detail) == (-11, "killed by SIGSEGV")

    play(scenario())


def test_stacks_of_a_process_whose_main_thread_keeps_the_interpreter(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import ctypes, faulthandler
        file = open({str(tmp_path / "stacks")!r}, "w")
        faulthandler.register({STACKS_SIGNAL}, file=file, all_threads=True)
        print("ready", flush=True)
        while True:
            ctypes.PyDLL(None).pause()
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(STACKS_SIGNAL)

        async def written() -> None:
            await until(lambda: "line 7" in (tmp_path / "stacks").read_text())

        try:
            play(written())
            assert process.poll() is None
        finally:
            process.kill()
