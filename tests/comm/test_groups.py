from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess

from hotswap.comm import Groups
from hotswap.comm.gloo import REBUILD, RECONFIGURE
from hotswap.errors import Fenced, PeerFault

pytestmark = pytest.mark.usefixtures("gloo_swap")


def _sum_of(group: Any = None) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_groups_are_no_ops_until_connected_and_real_afterwards(gloo_swap: str) -> None:
    def main(process: SlotProcess) -> Any:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = halves[process.slot // 2]
        before = (_sum_of(), _sum_of(mine))
        report = process.groups.connect(1, process.values)
        gets = process.values.gets
        agreed = process.groups.gate(10 + process.slot)
        after = (_sum_of(), _sum_of(mine))
        process.barrier("end")
        return [before, after, len(report.formed), gets, agreed]

    results = Fleet(4).run(main)
    for slot in range(4):
        before, after, formed, gets, agreed = results[slot]
        assert before == [slot + 1, slot + 1]
        assert after == [10, 3 if slot < 2 else 7]
        assert agreed == 13, "the largest proposal"
        assert formed == 3  # world, own half, control
        messages = {REBUILD: 1, RECONFIGURE: 2}[gloo_swap]
        assert gets == 3 * messages, "as many look-ups for each other slot, whatever the number of groups"


def test_a_killed_slot_is_replaced_and_all_groups_stay_the_same_objects() -> None:
    def main(process: SlotProcess) -> Any:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = halves[process.slot // 2]
        ids = [id(dist.group.WORLD), id(mine)]
        generation = 1
        if process.spare:
            process.values.get("fence/1", 20.0)
            generation = 2
        else:
            process.groups.connect(generation, process.values)
            parked = threading.Event()
            watch = process.watch(1, parked)
            try:
                for step in range(1000000):
                    process.groups.check()
                    if process.slot == 2 and step == 20:
                        process.die()
                    _sum_of(mine)
                    _sum_of()
            except (Fenced, RuntimeError):
                report = watch.park()
            assert report.parked
            process.groups.detach()
            assert _sum_of() == process.slot + 1, "detached: a local no-op"
            generation = 2
        process.groups.connect(generation, process.values)
        process.groups.gate()
        after = [_sum_of(), _sum_of(mine)]
        same = ids == [id(dist.group.WORLD), id(mine)]
        process.groups.retire().join(10.0)
        process.barrier("end")
        return [after, same]

    results = Fleet(4).run(main, spare_for=frozenset({2}))
    assert results[2] == "killed"
    assert results[0] == results[1] == [[10, 3], True]
    assert results[3] == results["spare2"] == [[10, 7], True]


def test_swaps_work_without_release_too() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.close()
        process.groups = Groups(slot=process.slot, world_size=2, allow_release=False)
        process.groups.install()
        before = process.groups.swaps_left()
        sums = []
        for generation in (1, 2, 3):
            process.groups.connect(generation, process.values)
            sums.append(_sum_of())
            process.barrier(f"used/{generation}")
            process.groups.detach()
            sums.append(_sum_of())
        after = process.groups.swaps_left()
        assert before is not None
        assert after is not None
        return [sums, before - after]

    results = Fleet(2).run(main)
    assert results == {0: [[3.0, 1.0] * 3, 6], 1: [[3.0, 2.0] * 3, 6]}


def test_connect_is_fenced_when_the_generation_ends_before_a_peer_comes() -> None:
    def main(process: SlotProcess) -> Any:
        if process.slot == 1:
            process.values.get("gave-up", 20.0)
            return "never connected"
        parked = threading.Event()
        abort = {"parked": parked, "replaced": frozenset({1}), "settle_s": 0.0, "deadline_s": 5.0}
        timer = threading.Timer(0.2, process.groups.abort, kwargs=abort)
        timer.start()
        try:
            process.groups.connect(1, process.values)
        except PeerFault as error:
            outcome = type(error).__name__
        parked.set()
        timer.join()
        process.values.set("gave-up", b"")
        process.groups.detach()
        return [outcome, _sum_of()]

    results = Fleet(2).run(main)
    assert results[0] == ["Fenced", 1.0]
