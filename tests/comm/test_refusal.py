"""A main thread that begins one operation after the other parks although the abort, once begun, would hold it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from comm_fleet import Fleet, SlotProcess
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hotswap.comm import refusal
from hotswap.errors import Fenced

HOOKS = ("pre", "post", "abort")
HELD_S = 5.0
"""Ten times what NCCL's abort takes: far more than a busy machine makes a thread wait."""


class LikeNccl:
    """Gloo that aborts as NCCL does: in a thread of its own that holds what every operation begins with.

    Operations of a lower level than the one that refuses are made to need the lock; here the methods of ProcessGroup
    themselves, before anything is refused.
    """

    def __init__(self, process: SlotProcess) -> None:
        self.lock = threading.Lock()
        self.begun = threading.Event()
        self.ended = threading.Event()
        self._adapter: Any = process.groups._adapter
        self._abort = self._adapter.abort
        self._adapter.abort = self._abort_slowly
        for name in ("allreduce", "_allgather_base", "all_gather_single", "allgather"):
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._locked(getattr(ProcessGroup, name)))

    def _locked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                if self.begun.is_set():
                    raise RuntimeError("NCCL communicator was aborted")
            return method(*args, **kwargs)

        return call

    def _abort_slowly(self, links: Any) -> None:
        threading.Thread(target=self._hold, args=(list(links),), daemon=True).start()

    def _hold(self, links: Any) -> None:
        with self.lock:
            self.begun.set()
            self._abort(links)
            self.ended.wait(HELD_S)


def _kill_the_peer(issue: Callable[[LikeNccl], object]) -> Any:
    """One slot begins operations until it is stopped, the other dies; how the first was stopped, and what it has then."""

    def main(process: SlotProcess) -> Any:
        report, stopped = None, ""
        if process.spare:
            process.values.get("fence/1", 20.0)
        else:
            slow = LikeNccl(process)
            process.groups.connect(1, process.values)
            process.barrier("connected")
            if process.slot == 1:
                process.die()
            watch = process.watch(1, threading.Event(), settle_s=0.0)
            try:
                while True:
                    issue(slow)
            except (Fenced, RuntimeError) as error:
                stopped = type(error).__name__
            report = watch.park()
            assert report.parked, report
            assert report.ms < HELD_S * 1e3 / 2, f"waited for the abort: {report}"
            process.groups.detach()
            slow.ended.set()
            with slow.lock:
                slow.begun.clear()
        process.groups.connect(2, process.values)
        total = torch.tensor([process.slot + 1.0])
        dist.all_reduce(total)
        named = functional.all_reduce(torch.tensor([process.slot + 1.0]), "sum", dist.group.WORLD)
        process.groups.gate()
        return [stopped, float(total), float(named)]

    return Fleet(2).run(main, spare_for=frozenset({1}))


def _begin_all_reduce(_: LikeNccl) -> object:
    return dist.all_reduce(torch.ones(1), async_op=True)


def _begin_all_gather(_: LikeNccl) -> object:
    return dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), async_op=True)


def _be_freed_and_begin(slow: LikeNccl) -> object:
    """As a main thread that waits for the device, until the abort ends what runs there."""
    slow.begun.wait()
    return dist.all_reduce(torch.ones(1), async_op=True)


def _begin_in_backward(_: LikeNccl) -> object:
    value = torch.ones(1, requires_grad=True)
    return _Reduced.apply(value).sum().backward()  # type: ignore[no-untyped-call]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        dist.all_reduce(gradient, async_op=True)
        return gradient


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("issue", [_begin_all_reduce, _begin_all_gather, _begin_in_backward, _be_freed_and_begin])
def test_a_slot_that_begins_operations_does_not_wait_for_the_abort(issue: Callable[[LikeNccl], object]) -> None:
    results = _kill_the_peer(issue)
    assert results.pop(1) == "killed"
    assert results[0][1:] == results["spare1"][1:] == [3.0, 3.0]
    assert results[0][0] == "Fenced"


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _alone(main: Callable[[SlotProcess], Any]) -> Any:
    def connected(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        return main(process)

    return Fleet(1).run(connected)[0]


def _operations() -> dict[str, Callable[[], object]]:
    def one() -> torch.Tensor:
        return torch.ones(1)

    return {
        "all_reduce": lambda: dist.all_reduce(one()),
        "broadcast": lambda: dist.broadcast(one(), 0),
        "reduce": lambda: dist.reduce(one(), 0),
        "all_gather": lambda: dist.all_gather([one()], one()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(one(), one()),
        "gather": lambda: dist.gather(one(), [one()], 0),
        "scatter": lambda: dist.scatter(one(), [one()], 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one(), [one()]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one(), one()),
        "all_to_all": lambda: dist.all_to_all([one()], [one()]),
        "all_to_all_single": lambda: dist.all_to_all_single(one(), one()),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None], 1),
        "coalesced": _coalesced,
        "functional": lambda: functional.all_reduce(one(), "sum", _world()),
    }


def _coalesced() -> None:
    with dist._coalescing_manager(_world()):  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


@pytest.mark.filterwarnings("ignore")
def test_all_kinds_of_operations_are_refused_and_none_of_them_is_counted() -> None:
    def main(process: SlotProcess) -> Any:
        wrong = {}
        mine = process.groups._refusal
        for name, operation in _operations().items():
            operation()
            before = process.groups.issued()
            mine.begin([_world()])
            try:
                operation()
                wrong[name] = "was begun"
            except Fenced:
                pass
            except RuntimeError as error:
                if name != "functional" or "process group" not in str(error):
                    wrong[name] = repr(error)
            finally:
                process.groups.clear_pending()
                mine.lift()
            if process.groups.issued() != before:
                wrong[name] = "was counted"
            operation()
        for name, begin in {
            "send": lambda: dist.send(torch.ones(1), 0),
            "recv": lambda: dist.recv(torch.ones(1), 0),
            "recv from any": lambda: dist.recv(torch.ones(1)),
            "isend": lambda: _world().send([torch.ones(1)], 0, 0),
        }.items():
            mine.begin([_world()])
            try:
                begin()
                wrong[name] = "was begun"
            except (Fenced, ValueError) as error:  # torch itself refuses to send to oneself
                if isinstance(error, ValueError) and name not in ("send", "recv"):
                    wrong[name] = repr(error)
            mine.lift()
        return wrong

    assert _alone(main) == {}


def test_every_method_of_a_group_is_known() -> None:
    """A method that a new torch adds has to be put into one list or the other."""
    harmless = {
        *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "NCCLX", "FAKE", "__module__"),
        *("_backend_id", "_device_types", "_enable_collectives_timing", "_end_coalescing", "_get_backend", "_id"),
        *(
            "_get_backend_name",
            "_get_sequence_number_for_group",
            "_has_hooks",
            "_register_backend",
            "_pybind11_conduit_v1_",
        ),
        *(
            "_register_on_completion_hook",
            "_set_default_backend",
            "_set_group_desc",
            "_set_group_name",
            "abort",
            "boxed",
        ),
        *(
            "_set_sequence_number_for_group",
            "_wait_for_pending_works",
            "bound_device_id",
            "get_group_store",
            "group_desc",
        ),
        *(
            "group_name",
            "merge_remote_group",
            "name",
            "rank",
            "set_timeout",
            "shutdown",
            "size",
            "split_group",
            "unbox",
        ),
        "use_pg_for_symm_mem_rendezvous",
        # torch 2.14: nothing of ours or torch's collectives begins an operation by them.
        *("_add_ephemeral_timeout", "get_backend", "supports_window", "supports_reconfigure", "get_reconfigure_handle"),
        *("reconfigure", *(f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in HOOKS)),
    }
    there = {name for name in dir(ProcessGroup) if not name.startswith("__")}
    assert there - harmless - set(refusal.METHODS) == set()


def test_nothing_is_left_behind_when_the_groups_are_used_again() -> None:
    def main(process: SlotProcess) -> Any:
        other = dist.new_group([0])
        process.groups.detach()
        process.groups.connect(2, process.values)
        before = dict(vars(ProcessGroup))
        process.groups._refusal.begin([_world()])
        process.groups._refusal.begin([_world(), other])
        during = sorted(name for name, value in before.items() if vars(ProcessGroup)[name] is not value)
        process.groups._refusal.lift()
        process.groups._refusal.lift()
        after = [name for name, value in before.items() if vars(ProcessGroup)[name] is not value]
        functional.all_reduce(torch.ones(1), "sum", other)
        return [during == sorted(set(refusal.METHODS) & set(before)), after]

    assert _alone(main) == [True, []]


def test_groups_that_are_not_shut_do_not_refuse() -> None:
    def main(process: SlotProcess) -> Any:
        other = dist.new_group([0])
        process.groups.detach()
        process.groups.connect(2, process.values)
        process.groups._refusal.begin([_world()])
        dist.all_reduce(torch.ones(1), group=other)
        functional.all_reduce(torch.ones(1), "sum", other)
        with pytest.raises(Fenced, match="allreduce is not begun"):
            dist.all_reduce(torch.ones(1))
        return "kept"

    assert _alone(main) == "kept"


def test_a_group_that_was_destroyed_meanwhile_does_not_get_its_name_back() -> None:
    def main(process: SlotProcess) -> Any:
        other = dist.new_group([0])
        name = other.group_name
        process.groups._refusal.begin([other])
        dist.destroy_process_group(other)
        process.groups._refusal.lift()
        with pytest.raises(RuntimeError, match="resolve"):
            torch._C._distributed_c10d._resolve_process_group(name)
        return "gone"

    assert _alone(main) == "gone"


def test_operations_that_are_being_put_together_come_to_their_end() -> None:
    """NCCL would swallow all later operations of the thread behind a bracket that was left open."""

    def main(process: SlotProcess) -> Any:
        state = dist.distributed_c10d._world.pg_coalesce_state
        state[_world()] = []
        process.groups._refusal.begin([_world()])
        work = _world().allreduce([torch.ones(1)])
        work.wait()
        with pytest.raises(Fenced):
            _world()._start_coalescing(torch.device("cpu"))  # type: ignore[attr-defined]
        state.clear()
        with pytest.raises(Fenced):
            _world().allreduce([torch.ones(1)])
        return "done"

    assert _alone(main) == "done"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parallel", ["fsdp2", "tensor"])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_sharded_models_stop_in_forward_and_backward_and_go_on_afterwards(parallel: str, moment: str) -> None:
    def main(process: SlotProcess) -> Any:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        if parallel == "fsdp2":
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        process.groups.detach()
        process.groups.connect(1, process.values)
        groups = [item.group for item in process.groups._live()]

        def step() -> float:
            out = model(torch.ones(2, 4, requires_grad=True)).sum()
            if moment == "backward" and refused:
                process.groups._refusal.begin(groups)
            out.backward()
            return float(out)

        refused = False
        first = step()
        refused = True
        if moment == "forward":
            process.groups._refusal.begin(groups)
        with pytest.raises((Fenced, RuntimeError)) as caught:
            step()
        refused = False
        process.barrier("stopped")
        process.groups.detach()
        process.groups.connect(2, process.values)
        return [first, type(caught.value).__name__, process.groups.issued()[0]]

    first, second = Fleet(2).run(main).values()
    assert first == second
