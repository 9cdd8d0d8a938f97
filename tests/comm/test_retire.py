from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess

from hotswap.comm.plug import FIRST_FRESH_VALUE, LAST_FRESH_VALUE, Plug
from hotswap.errors import UsageError

pytestmark = pytest.mark.usefixtures("gloo_swap")

SWAPS = 30
GROUPS = 5


def _usage() -> tuple[int, int, int]:
    """Threads, descriptors, resident KiB."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident


def test_threads_descriptors_and_memory_stay_flat_over_swaps() -> None:
    def main(process: SlotProcess) -> Any:
        groups = [dist.new_group([0, 1]) for _ in range(GROUPS)]
        usage = []
        for generation in range(1, SWAPS + 1):
            process.groups.connect(generation, process.values)
            for group in groups:
                dist.all_reduce(torch.ones(1000), group=group)
            process.barrier(f"used/{generation}")
            process.groups.detach()
            process.groups.retire().join(10.0)
            usage.append(_usage())
        process.barrier("end")
        return usage

    results = Fleet(2).run(main)
    for slot in range(2):
        threads, descriptors, resident = (list(column) for column in zip(*results[slot], strict=True))
        # The lowest of a few, for a joined thread may take a moment to leave the process.
        assert min(threads[-5:]) <= min(threads[:5]), threads
        assert min(descriptors[-5:]) <= min(descriptors[:5]), descriptors
        assert resident[-1] - resident[4] < 3 * 1024, resident


def test_destroying_old_backends_does_not_stop_other_threads() -> None:
    """Their destructors wait for gloo's event loop; with the interpreter locked, a training step would wait too."""

    def main(process: SlotProcess) -> Any:
        for _ in range(20):
            dist.new_group([0, 1])
        process.groups.connect(1, process.values)
        process.groups.gate()
        process.barrier("used")
        process.groups.detach()
        thread = process.groups.retire()
        turns = 0
        while thread.is_alive():
            turns += 1
        process.barrier("end")
        return turns

    assert min(Fleet(2).run(main).values()) > 1000


def test_without_release_the_swaps_are_counted_and_refused_when_used_up() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.close()
        plug = Plug(["cpu"], allow_release=False)
        dist.init_process_group("fake", rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        before = plug.swaps_left()
        fakes = [dist.new_group([0])._get_backend(torch.device("cpu")) for _ in range(300)]
        done = 0
        with pytest.raises(UsageError, match="used up; restart"):
            for fake in fakes:
                plug.put([(group, {"cpu": fake})])
                done += 1
        dist.all_reduce(torch.ones(1))
        return [before, done, plug.swaps_left()]

    room = LAST_FRESH_VALUE + 1 - FIRST_FRESH_VALUE
    assert Fleet(1).run(main)[0] == [room, room, 0]


def test_swaps_are_unlimited_when_old_backends_can_be_released() -> None:
    def main(process: SlotProcess) -> Any:
        for _ in range(300):
            process.groups.detach()
        return process.groups.swaps_left()

    assert Fleet(1).run(main)[0] is None
