"""What only concerns backends that are connected anew; the contract of both adapters is tested elsewhere."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess, queued_bytes

from hotswap.comm import reconfigure
from hotswap.comm.gloo import REBUILD, RECONFIGURE, SWAP, THREADS_PER_GROUP, GlooAdapter
from hotswap.errors import Fenced, UsageError

ELEMENTS = 30_000_000
"""More bytes than fit into the sockets' buffers."""
CPU = torch.device("cpu")


def _sum_of(group: Any = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _world_backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(CPU)


@pytest.mark.usefixtures("reconfigures")
def test_survivors_keep_their_backends_and_only_their_connections_are_new() -> None:
    def main(process: SlotProcess) -> Any:
        pair = dist.new_group([0, 1])
        process.groups.connect(1, process.values)
        before = [_world_backend(), pair._get_backend(CPU)]
        process.groups.gate()
        process.groups.detach()
        process.groups.connect(2, process.values)
        after = [_world_backend(), pair._get_backend(CPU)]
        process.groups.retire().join(10.0)
        sums = [_sum_of(), _sum_of(pair)]
        issued = sorted(state.issued for state in process.groups.counts().values())
        process.barrier("end")
        return [[a is b for a, b in zip(before, after, strict=True)], sums, issued]

    results = Fleet(2).run(main)
    assert results[0] == results[1] == [[True, True], [2.0, 2.0], [0, 1, 1]]


@pytest.mark.usefixtures("reconfigures")
def test_a_backend_whose_threads_are_all_taken_is_not_free() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        process.barrier("connected")
        free, works = [], []
        if process.slot == 0:
            for _ in range(THREADS_PER_GROUP):
                free.append(reconfigure.is_free(_world_backend()))
                works.append(dist.all_reduce(torch.ones(1), async_op=True))  # slot 1 never comes
            free.append(reconfigure.is_free(_world_backend()))
        process.barrier("end")
        return free

    assert Fleet(2).run(main)[0] == [True, True, False]


@pytest.mark.usefixtures("reconfigures")
def test_a_backend_that_is_not_free_is_replaced_without_the_peers_having_to_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        process.groups.gate()
        old = _world_backend()
        process.groups.detach()
        monkeypatch.setattr(reconfigure, "is_free", lambda _backend: process.slot != 0)
        process.groups.connect(2, process.values)
        process.groups.retire().join(10.0)
        total = _sum_of()
        process.barrier("end")
        return [total, _world_backend() is old]

    assert Fleet(2).run(main) == {0: [2.0, False], 1: [2.0, True]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("gloo_swap")
def test_groups_work_again_after_a_slot_died_in_the_middle_of_a_collective() -> None:
    """gloo forgets what it has received a part of, and the thread that waits for the rest is lost until the time-out."""

    def main(process: SlotProcess) -> Any:
        if not process.spare:
            process.groups.connect(1, process.values)
            process.barrier("connected")
            watch = process.watch(1, threading.Event())
            _broadcast_until_fenced(process)
            assert watch.park().parked
            process.groups.detach()
        process.groups.connect(2, process.values)
        sums = [_sum_of() for _ in range(10)]
        process.barrier("end")
        return sums

    results = Fleet(2).run(main, spare_for=frozenset({0}))
    assert results == {0: "killed", 1: [2.0] * 10, "spare0": [2.0] * 10}


def _broadcast_until_fenced(process: SlotProcess) -> None:
    tensors = [torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)]
    works: list[Any] = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
    if process.slot == 0:
        while not queued_bytes(process) and not works[-1].is_completed():
            pass
        process.die()
    try:
        for work in works:
            work.wait()
        dist.all_reduce(torch.ones(1))
    except (Fenced, RuntimeError):
        pass


@pytest.mark.usefixtures("reconfigures")
def test_a_failed_connect_leaves_nothing_that_the_next_one_trips_over() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        process.groups.gate()
        process.groups.detach()
        if process.slot == 0:
            parked = threading.Event()
            parked.set()
            abort = {"parked": parked, "replaced": frozenset({1}), "settle_s": 0.0, "deadline_s": 5.0}
            timer = threading.Timer(0.2, process.groups.abort, kwargs=abort)
            timer.start()
            with pytest.raises(Fenced):
                process.groups.connect(2, process.values)
            timer.join()
            process.groups.detach()
        process.barrier("given-up")
        process.groups.connect(3, process.values)
        total = _sum_of()
        process.groups.retire().join(15.0)
        process.barrier("end")
        return total

    assert Fleet(2).run(main) == {0: 2.0, 1: 2.0}


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(process: SlotProcess) -> Any:
        monkeypatch.setenv(SWAP, "renew")
        with pytest.raises(UsageError, match="HOTSWAP_GLOO_SWAP=renew is not known; use rebuild or reconfigure"):
            GlooAdapter(host="127.0.0.1", timeout_s=1.0, devices=["cpu"])
        return True

    assert Fleet(1).run(main)[0]


def test_rebuild_is_used_where_torch_can_not_reconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWAP, raising=False)

    def main(process: SlotProcess) -> Any:
        adapter: Any = process.groups._adapter
        ways = [adapter.swap]
        monkeypatch.setattr(reconfigure, "is_supported", lambda _backend: False)
        ways.append(GlooAdapter(host="127.0.0.1", timeout_s=1.0, devices=["cpu"], swap=RECONFIGURE).swap)
        monkeypatch.setattr(reconfigure, "enable", lambda _options: False)
        ways.append(GlooAdapter(host="127.0.0.1", timeout_s=1.0, devices=["cpu"], swap=RECONFIGURE).swap)
        return ways

    assert Fleet(1).run(main)[0] == [REBUILD] * 3


def test_objects_without_the_capability_say_so() -> None:
    assert not reconfigure.enable(object())
    assert not reconfigure.is_supported(object())
    assert not reconfigure.is_supported(SimpleNamespace(supports_reconfigure=False))


@pytest.mark.usefixtures("reconfigures")
def test_a_torch_whose_reconfigure_takes_no_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(process: SlotProcess) -> Any:
        real, done = reconfigure.connect, []

        def only_once(backend: Any, handles: Any, timeout_s: float) -> None:
            if not done:
                real(backend, handles, timeout_s)
            done.append(True)

        monkeypatch.setattr(reconfigure, "connect", only_once)
        with pytest.raises(UsageError, match="goes on as it was; use HOTSWAP_GLOO_SWAP=rebuild"):
            GlooAdapter(host="127.0.0.1", timeout_s=1.0, devices=["cpu"])
        return True

    assert Fleet(1).run(main)[0]
