"""Wrong use and unsuitable torch builds are refused with a message that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess

from hotswap.comm import Groups, native, plug
from hotswap.comm.rouse import rouse
from hotswap.errors import UsageError


@pytest.mark.parametrize(("slot", "host", "message"), [(2, "127.0.0.1", "not in a world"), (0, "node1", "numeric")])
def test_wrong_arguments_are_refused(slot: int, host: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Groups(slot=slot, world_size=2, host=host)


def test_an_initialised_torch_distributed_is_refused() -> None:
    def main(process: SlotProcess) -> Any:
        with pytest.raises(UsageError, match="already initialised"):
            Groups(slot=0, world_size=1).install()
        return True

    assert Fleet(1).run(main)[0]


def test_a_group_of_another_backend_is_refused_at_once() -> None:
    def main(process: SlotProcess) -> Any:
        with pytest.raises(Exception, match="create_gloo_process_groups=False"):
            dist.new_group([0, 1], backend="gloo")
        return True

    assert Fleet(2).run(main) == {0: True, 1: True}


def test_keeping_a_group_that_was_never_connected_is_refused() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        (world,) = (key for key in process.groups.counts() if key.startswith("0@"))
        process.groups.detach()
        with pytest.raises(UsageError, match="has no connection"):
            process.groups.connect(2, process.values, frozenset({world}))
        process.barrier("end")
        return True

    assert Fleet(2).run(main) == {0: True, 1: True}


def test_a_torch_whose_swaps_take_no_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.close()
        broken = Groups(slot=0, world_size=1)
        broken._plug.put = lambda plugged: None  # type: ignore[method-assign]
        with pytest.raises(UsageError, match=f"torch {torch.__version__}".replace("+", r"\+")):
            broken.install()
        return True

    assert Fleet(1).run(main)[0]


def test_an_unrouted_backend_is_noticed_by_the_plug() -> None:
    def main(process: SlotProcess) -> Any:
        ignoring = plug.Plug(["cpu"], allow_release=False)
        group = dist.group.WORLD
        assert group is not None
        used = group._get_backend(torch.device("cpu"))
        ignoring.put([(group, {"cpu": used})])
        # The same value once more: c10d keeps the first backend, as a torch that can not swap would do always.
        ignoring._next_value -= 1
        other = dist.new_group([0])._get_backend(torch.device("cpu"))
        with pytest.raises(UsageError, match="did not route"):
            ignoring.put([(group, {"cpu": other})])
        return True

    assert Fleet(1).run(main)[0]


@pytest.mark.parametrize("name", ["function", "pointers"])
def test_torch_builds_without_the_symbols_fall_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(native, name, lambda *_: None)
    assert not plug.Plug(["cpu"]).releases
    assert plug.Plug(["cpu"]).swaps_left() == 224


def test_unknown_symbols_and_objects_are_answered_with_none() -> None:
    assert native.address("_ZN7hotswap7nothingE") is None
    assert native.function("_ZN7hotswap7nothingE") is None
    assert native.pointers("hotswap::Nothing") is None
    pointers = native.pointers("c10d::ProcessGroup")
    assert pointers is not None
    assert pointers(object()) is None
    assert pointers(torch.ones(1)) is None
    assert rouse(-1) == 0


def test_an_exception_in_a_coalescing_block_leaves_nothing_queued() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        group = dist.group.WORLD
        with pytest.raises(ZeroDivisionError), dist._coalescing_manager(group):  # type: ignore[attr-defined]
            dist.all_reduce(torch.ones(1))
            raise ZeroDivisionError
        queued = torch.ones(1)
        dist.all_reduce(queued)
        process.groups.clear_pending()
        total = torch.ones(1)
        dist.all_reduce(total)
        process.barrier("end")
        return [queued.item(), total.item()]

    assert Fleet(2).run(main)[0] == [1.0, 2.0], "queued before, run after"
