"""An agent that is told to leave."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from agent_kit import bench, holder, play, settings

from hotswap.core import messages as m
from hotswap.errors import EXIT_REQUEUE
from hotswap.node.departure import Departure

Patch = pytest.MonkeyPatch


def test_it_says_so_and_every_coordinator_hears_it(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, drain_s=50.0) as it:
            assert (await it.register()).leaves_in_s is None
            it.tell(m.DrainNode(reason="by hand"))
            first = await it.hear(m.NodeDraining)
            assert first.reason == "by hand" and 49 < first.leaves_in_s <= 50
            # Told again it answers again; its time does not begin anew.
            os.kill(os.getpid(), signal.SIGUSR1)
            second = await it.hear(m.NodeDraining)
            assert second.reason == "signal" and second.leaves_in_s < first.leaves_in_s
            it.drop()
            left_s = (await it.register()).leaves_in_s
            assert left_s is not None and 0 < left_s < second.leaves_in_s

    play(scenario())


def test_it_passes_an_order_to_halt_on_to_its_workers(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.tell(m.Halt(generation=7))
            await worker.silent(m.Halt)
            it.tell(m.Halt(generation=1, durable=True))
            assert await worker.hear(m.Halt) == m.Halt(generation=1, durable=True)

    play(scenario())


def test_it_goes_if_nobody_lets_it_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        departure = Departure(settings(tmp_path, drain_s=0.0), lambda _: None, left.set_result)
        departure._patience_s = 0.01
        departure.begin("notice")
        assert await asyncio.wait_for(left, 10) == EXIT_REQUEUE

    play(scenario())
