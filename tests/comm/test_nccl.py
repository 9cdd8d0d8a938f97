"""Stable groups over NCCL; every slot has a GPU of its own, and a spare waits on its victim's."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess

from hotswap.errors import Fenced, PeerUnreachable

WORLD = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices, one for each slot"),
]


def fleet() -> Fleet:
    return Fleet(WORLD, deadline_s=100.0, timeout_s=60.0, on_gpu=True)


def make_groups(count: int) -> list[Any]:
    return [dist.new_group([0, 1]) for _ in range(count)]


def use(process: SlotProcess, groups: list[Any], size: int = 1 << 20) -> list[float]:
    """An all-reduce in each group, without waiting in between; the sums."""
    tensors = [torch.full((size,), float(process.slot + index), device=process.device) for index in range(len(groups))]
    for tensor, group in zip(tensors, groups, strict=True):
        dist.all_reduce(tensor, group=group)
    return [float(tensor[-1]) for tensor in tensors]


def test_groups_reach_the_peer_for_tensors_on_either_side() -> None:
    def main(process: SlotProcess) -> Any:
        groups = make_groups(3)
        detached = use(process, groups)
        process.groups.connect(1, process.values)
        device = use(process, groups)
        host = torch.tensor([process.slot + 1.0])
        dist.all_reduce(host)
        objects: list[Any] = [{"slot": 0} if process.slot == 0 else None]
        dist.broadcast_object_list(objects, src=0)
        dist.barrier()
        pair = [torch.full((4,), float(process.slot), device=process.device), torch.empty(4, device=process.device)]
        peer = 1 - process.slot
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, pair[0], peer), dist.P2POp(dist.irecv, pair[1], peer)])
        for work in works:
            work.wait()
        process.groups.gate()
        return [detached, device, float(host), objects, float(pair[1][0])]

    for slot, result in fleet().run(main).items():
        own = [float(slot + index) for index in range(3)]
        assert result == [own, [1.0, 3.0, 5.0], 3.0, [{"slot": 0}], float(1 - slot)]


@pytest.mark.parametrize("groups_count", [2, 20])
def test_a_spare_takes_the_place_of_a_slot_that_died_in_a_collective(groups_count: int) -> None:
    def main(process: SlotProcess) -> Any:
        groups = make_groups(groups_count)
        timing: dict[str, float] = {}
        if process.spare:
            torch.ones(1, device=process.device).sum().item()
            process.values.get("fence/1", 60.0)
        else:
            began = time.monotonic()
            process.groups.connect(1, process.values)
            timing["connect 1"] = time.monotonic() - began
            use(process, groups)
            process.barrier("connected")
            watch = process.watch(1, threading.Event())
            with pytest.raises((Fenced, PeerUnreachable, RuntimeError)):
                for step in range(10_000):
                    if process.slot == 1 and step == 20:
                        process.die()
                    use(process, groups)
                    process.groups.check()
            report = watch.park()
            assert report.parked, report
            timing["abort"] = report.ms / 1e3
            began = time.monotonic()
            process.groups.detach()
            timing["detach"] = time.monotonic() - began
        report = process.groups.connect(2, process.values)
        timing["connect 2"] = report.ms / 1e3
        began = time.monotonic()
        sums = use(process, groups)
        timing["first use"] = time.monotonic() - began
        process.groups.gate()
        process.groups.retire().join()
        process.barrier("end")
        return [sums, timing]

    results = fleet().run(main, spare_for=frozenset({1}))
    assert results.pop(1) == "killed"
    print(json.dumps(results))
    for sums, _ in results.values():
        assert sums == [1.0 + 2.0 * index for index in range(groups_count)]


def test_a_slot_that_waits_for_a_silent_peer_is_freed_and_its_device_is_healthy() -> None:
    def main(process: SlotProcess) -> Any:
        groups = make_groups(3)
        process.groups.connect(1, process.values)
        use(process, groups)
        process.barrier("connected")
        result = None
        if process.slot == 0:
            watch = process.watch(1, threading.Event(), settle_s=0.0)
            tensors = [torch.ones(1024, device=process.device) for _ in groups]
            for tensor, group in zip(tensors, groups, strict=True):
                dist.all_reduce(tensor, group=group)
            process.values.set("fence/1", b"[1]")
            # No exception comes from the device: what an aborted collective leaves is garbage.
            torch.cuda.synchronize()
            with pytest.raises(Fenced):
                process.groups.gate()
            parked = watch.park().parked
            process.groups.detach()
            result = [parked, float(torch.ones(1024, device=process.device).sum())]
        process.barrier("end")
        return result

    assert fleet().run(main)[0] == [True, 1024.0]


def test_the_memory_of_replaced_communicators_is_given_back() -> None:
    def main(process: SlotProcess) -> Any:
        groups = make_groups(6)
        free = []
        for generation in range(1, 6):
            process.groups.connect(generation, process.values)
            use(process, groups)
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
            process.groups.detach()
            process.groups.retire().join()
            process.barrier(f"end {generation}")
        return free

    for free in fleet().run(main).values():
        assert free[1] - free[-1] < 64 << 20, free
