from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess
from comm_mix import make_mesh, step
from torch import nn

from hotswap.comm import add_safe_points
from hotswap.errors import Fenced, PeerUnreachable

pytestmark = pytest.mark.usefixtures("gloo_swap")

WORLD = 8


def _kill_while_busy(victim: int, delay_s: float) -> dict[Any, Any]:
    """Kill a slot at some moment of a busy step; everybody must park, swap and go on."""

    def main(process: SlotProcess) -> Any:
        mesh = make_mesh(process.slot)
        report = None
        if process.spare:
            process.values.get("fence/1", 20.0)
        else:
            process.groups.connect(1, process.values)
            process.barrier("connected")
            watch = process.watch(1, threading.Event())
            if process.slot == victim:
                threading.Timer(delay_s, process.die).start()
            try:
                while True:
                    step(process, mesh, 1000)
            except (Fenced, PeerUnreachable, RuntimeError):
                report = watch.park()
            assert report.parked, report
            process.groups.detach()
        process.groups.connect(2, process.values)
        values = [step(process, mesh, 1000) for _ in range(3)]
        process.groups.retire()
        process.barrier("end")
        return values

    return Fleet(WORLD).run(main, spare_for=frozenset({victim}))


@pytest.mark.filterwarnings("ignore")
def test_nobody_hangs_when_a_busy_slot_is_killed() -> None:
    chance = random.Random(7)
    for _ in range(5):
        results = _kill_while_busy(chance.randrange(WORLD), chance.uniform(0.0, 0.1))
        assert sum(result == "killed" for result in results.values()) == 1
        assert len({repr(result) for result in results.values()}) == 2, "all others computed the same"


def test_groups_without_a_replaced_slot_are_shut_when_the_main_thread_waits_in_one() -> None:
    def main(process: SlotProcess) -> Any:
        pair = dist.new_group([0, 1])
        process.groups.connect(1, process.values)
        process.barrier("connected")
        result = None
        if process.slot == 0:
            watch = process.watch(1, threading.Event(), settle_s=0.0, grace_s=0.1)
            process.values.set("fence/1", b"[2]")
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=pair)  # slot 1 never comes
            report = watch.park()
            states = [state for state in process.groups.counts().values() if state.members == (0, 1)]
            result = [report.parked, len(report.aborted), [state.intact for state in states]]
        process.barrier("end")
        return result

    assert Fleet(3).run(main)[0] == [True, 3, [False]]


def test_a_parked_slot_keeps_the_groups_that_have_no_replaced_slot() -> None:
    def main(process: SlotProcess) -> Any:
        pair = dist.new_group([0, 1])
        process.groups.connect(1, process.values)
        process.barrier("connected")
        parked = threading.Event()
        parked.set()
        report = process.groups.abort(parked=parked, replaced=frozenset({2}), settle_s=0.0, deadline_s=1.0)
        process.barrier("aborted")
        total = torch.ones(1)
        if process.slot < 2:
            dist.all_reduce(total, group=pair)
        intact = sorted((state.members, state.intact) for state in process.groups.counts().values())
        process.barrier("end")
        return [len(report.aborted), total.item(), intact]

    results = Fleet(3).run(main)
    assert results[0] == results[1] == [2, 2.0, [[[0, 1], True], [[0, 1, 2], False], [[0, 1, 2], False]]]


def test_a_main_thread_that_never_parks_is_reported_at_the_deadline() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        began = time.monotonic()
        report = process.groups.abort(parked=threading.Event(), replaced=frozenset(), settle_s=0.0, deadline_s=0.3)
        return [report.parked, len(report.aborted), 0.25 < time.monotonic() - began < 2.0]

    assert Fleet(2).run(main)[0] == [False, 2, True]


def test_the_gate_raises_when_a_slot_is_gone() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        process.groups.gate()
        if process.slot == 1:
            process.die()
        try:
            process.groups.gate()
        except PeerUnreachable as error:
            return "gate" in str(error)
        return None

    assert Fleet(2).run(main)[0] is True


def test_safe_points_stop_forward_and_backward_at_blocks() -> None:
    def main(process: SlotProcess) -> Any:
        blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        reached: list[int] = []

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = blocks

            def forward(self, value: torch.Tensor, stop_before: int) -> torch.Tensor:
                for number, block in enumerate(self.blocks):
                    if number == stop_before:
                        process.groups._stop.set()
                    value = block(value)
                    reached.append(number)
                return value

        net = Net()
        handles = add_safe_points(net, process.groups)
        with pytest.raises(Fenced):
            net(torch.ones(1, 3), 2)
        in_forward = list(reached)
        with pytest.raises(Fenced):
            net(torch.ones(1, 3), 99)
        process.groups.detach()
        out = net(torch.ones(1, 3), 99).sum()
        process.groups._stop.set()
        with pytest.raises(Fenced):
            out.backward()
        for handle in handles:
            handle.remove()
        net(torch.ones(1, 3), 99).sum().backward()
        return [in_forward, len(handles)]

    assert Fleet(1).run(main)[0] == [[0, 1], 9]
