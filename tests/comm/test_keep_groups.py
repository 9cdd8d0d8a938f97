from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess

from hotswap.core.keep import GroupState, groups_to_keep
from hotswap.errors import Fenced

pytestmark = pytest.mark.usefixtures("gloo_swap")

VICTIM = 2
Trick = Callable[[SlotProcess, Any], Any]
"""What a slot does in its half before it is stopped in the world group; its result is kept alive."""


def _sum_of(group: Any = None) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _swap(trick: Trick) -> dict[Any, Any]:
    """Kill slot 2 of two halves {0, 1} and {2, 3}; keep what can be kept; result: (halves' key kept, sums, same connections)."""

    def main(process: SlotProcess) -> Any:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = halves[process.slot // 2]
        if not process.spare:
            process.groups.connect(1, process.values)
            parked = threading.Event()
            watch = process.watch(1, parked, grace_s=1.0)
            alive = _train_until_fenced(process, mine, trick)
            report = watch.park()
            assert report.parked
            assert alive is not None
            counts = process.groups.counts()
            states = {key: [list(s.members), s.issued, s.intact] for key, s in counts.items()}
            process.values.set(f"counts/{process.slot}", json.dumps(states).encode())
        keep = _agree(process)
        before = _link_of(process, mine)
        if not process.spare:
            process.groups.detach(keep)
        result = process.groups.connect(2, process.values, keep if not process.spare else frozenset())
        process.groups.gate()
        sums = [(_sum_of(mine), _sum_of()) for _ in range(20)]
        same = before is _link_of(process, mine)
        process.groups.retire().join(10.0)
        process.barrier("end")
        return [len(result.kept), sorted(set(sums)), same]

    return Fleet(4).run(main, spare_for=frozenset({VICTIM}))


def _link_of(process: SlotProcess, group: Any) -> Any:
    (key,) = (item.spec.key for item in process.groups._live() if item.group is group)
    return process.groups._links.get(key)


def _train_until_fenced(process: SlotProcess, mine: Any, trick: Trick) -> Any:
    alive = None
    try:
        for step in range(1_000_000):
            process.groups.check()
            _sum_of(mine)
            if step == 20:
                alive = [trick(process, mine)]
                if process.slot == VICTIM:
                    process.die()
            _sum_of()
    except (Fenced, RuntimeError):
        pass
    return alive


def _agree(process: SlotProcess) -> frozenset[str]:
    reports = {}
    for slot in {0, 1, 2, 3} - {VICTIM}:
        states = json.loads(process.values.get(f"counts/{slot}", 20.0))
        reports[slot] = {k: GroupState(members=tuple(m), issued=i, intact=ok) for k, (m, i, ok) in states.items()}
    return groups_to_keep(reports, frozenset({VICTIM}))


def _nothing(_: SlotProcess, __: Any) -> None:
    """Both members stop after the same operation."""


def _one_ahead(process: SlotProcess, mine: Any) -> Any:
    """Slot 0 has started an operation that slot 1 never will."""
    return dist.all_reduce(torch.ones(1), group=mine, async_op=True) if process.slot == 0 else None


def _completed_p2p(process: SlotProcess, mine: Any) -> None:
    """Equal counts, all data received; but counts could not have told an unread message from a read one."""
    if process.slot < VICTIM:
        tensor = torch.ones(1)
        (dist.send if process.slot == 0 else dist.recv)(tensor, 1 - process.slot, group=mine)


def _unread_messages(process: SlotProcess, mine: Any) -> Any:
    """Equal counts, but both messages are still under way; a later receive would get one of them."""
    if process.slot < VICTIM:
        return dist.isend(torch.full((1,), 99.0), 1 - process.slot, group=mine)
    return None


def test_a_group_that_all_members_left_equally_goes_on_with_its_backend() -> None:
    results = _swap(_nothing)
    assert results[0] == results[1] == [1, [[3.0, 10.0]], True]
    assert results[3] == results["spare2"] == [0, [[7.0, 10.0]], False]


def test_a_group_with_unequal_counts_is_rebuilt() -> None:
    results = _swap(_one_ahead)
    assert results[0] == results[1] == [0, [[3.0, 10.0]], False]


def test_a_group_with_point_to_point_traffic_is_rebuilt() -> None:
    for trick in (_completed_p2p, _unread_messages):
        results = _swap(trick)
        assert results[0] == results[1] == [0, [[3.0, 10.0]], False], trick.__name__


def test_a_kept_group_is_not_disturbed_by_others_with_the_same_members_that_are_connected_again() -> None:
    def main(process: SlotProcess) -> Any:
        kept, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        process.groups.connect(1, process.values)
        before = [_sum_of(kept), _sum_of(other)]
        keep = frozenset({_link_of(process, kept).spec.key})
        process.barrier("used")
        process.groups.detach(keep)
        report = process.groups.connect(2, process.values, keep)
        process.groups.gate()
        process.groups.retire().join(10.0)
        after = [_sum_of(kept), _sum_of(other)]
        process.barrier("end")
        return [before, after, set(report.kept) == keep]

    results = Fleet(2).run(main)
    assert results[0] == results[1] == [[3.0, 3.0], [3.0, 3.0], True]
