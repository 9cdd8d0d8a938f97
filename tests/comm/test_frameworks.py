"""Objects of unmodified frameworks go on working across a swap with the groups that they cached."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hotswap.errors import Fenced

pytestmark = pytest.mark.usefixtures("gloo_swap")

WORLD = 4
VICTIM = 2


@dataclass
class Subject:
    """Framework objects under test."""

    compute: Callable[[], list[torch.Tensor]]
    """Communicates and returns what must be the same before and after; leaves no state behind."""
    groups: Callable[[], list[Any]]
    """The process groups that the objects hold now."""
    before_swap: bool = True
    """False where a run changes what later runs communicate, which a fresh spare can not know."""


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


def _inputs() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))


def ddp() -> Subject:
    module = DistributedDataParallel(_model(), init_sync=False)

    def compute() -> list[torch.Tensor]:
        module(_inputs()).pow(2).sum().backward()
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    return Subject(compute=compute, groups=lambda: [module.process_group], before_swap=False)


def fsdp2() -> Subject:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = _model()
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)

    def compute() -> list[torch.Tensor]:
        module(_inputs()).pow(2).sum().backward()
        grads = [parameter.grad.to_local().clone() for parameter in module.parameters()]
        module.zero_grad()
        return grads

    return Subject(compute=compute, groups=mesh.get_all_groups)


def dtensor() -> Subject:
    mesh = init_device_mesh("cpu", (4,))

    def compute() -> list[torch.Tensor]:
        whole = torch.arange(16.0).reshape(4, 4)
        shared = distribute_tensor(whole, mesh, [Shard(0)])
        return [(shared @ distribute_tensor(whole, mesh, [Shard(1)])).full_tensor()]

    return Subject(compute=compute, groups=mesh.get_all_groups)


def megatron() -> Subject:
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    # Megatron allocates on "the current CUDA device"; this runs in a forked slot, which ends after the test.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False)

    def compute() -> list[torch.Tensor]:
        local = torch.full((2, 2), float(dist.get_rank() + 1))
        summed = mappings.reduce_from_tensor_model_parallel_region(local.clone())
        gathered = mappings.gather_from_tensor_model_parallel_region(local.clone())
        dist.all_reduce(local, group=parallel_state.get_data_parallel_group())
        return [summed, gathered, local]

    def groups() -> list[Any]:
        values = vars(parallel_state).values()
        return [value for value in values if isinstance(value, dist.ProcessGroup)]

    return Subject(compute=compute, groups=groups)


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def _until_fenced(process: SlotProcess) -> None:
    watch = process.watch(1, threading.Event())
    try:
        if process.slot == VICTIM:
            process.die()
        while True:
            process.groups.check()
            dist.all_reduce(torch.ones(1))
    except (Fenced, RuntimeError):
        assert watch.park().parked
    process.groups.detach()


PRELOAD = {
    ddp: ("torch._dynamo",),
    fsdp2: ("torch._dynamo",),
    dtensor: ("torch._dynamo",),
    megatron: ("megatron.core.tensor_parallel.mappings",),
}


@pytest.mark.parametrize("build", PRELOAD)
def test_cached_groups_work_after_a_swap(build: Callable[[], Subject]) -> None:
    def main(process: SlotProcess) -> Any:
        subject = build()
        held = [id(group) for group in subject.groups()]
        before = None
        if not process.spare:
            process.groups.connect(1, process.values)
            if subject.before_swap:
                before = _digest(subject.compute())
            process.values.set(f"before/{process.slot}", repr(before).encode())
            process.barrier("computed")
            _until_fenced(process)
        else:
            process.values.get("fence/1", 20.0)
        process.groups.connect(2, process.values)
        after = _digest(subject.compute())
        expected = process.values.get(f"before/{process.slot}", 20.0).decode()
        everyone = process.gather("after", after)
        process.groups.retire().join(10.0)
        process.barrier("end")
        return {
            "groups": len(held),
            "same groups": held == [id(group) for group in subject.groups()],
            "same result": expected in (repr(after), "None"),
            "distinct results": len(set(everyone)),
        }

    if build is megatron and not importlib.util.find_spec("megatron.core"):
        pytest.skip("Megatron-Core is not installed")
    results = Fleet(WORLD).run(main, spare_for=frozenset({VICTIM}), preload=PRELOAD[build])
    assert results.pop(VICTIM) == "killed"
    for name, result in results.items():
        assert result["groups"] > 0, name
        assert result["same groups"], name
        assert result["same result"], name
        assert result["distinct results"] == (1 if build in (ddp, dtensor) else result["distinct results"]), name


def test_ddp_after_a_swap_has_the_gradients_of_one_process() -> None:
    def main(process: SlotProcess) -> Any:
        subject = ddp()
        process.groups.connect(1, process.values)
        grads = subject.compute()
        module = _model()
        for rank in range(WORLD):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
            (module(inputs).pow(2).sum() / WORLD).backward()
        expected = [parameter.grad for parameter in module.parameters()]
        process.barrier("end")
        return all(torch.allclose(a, b) for a, b in zip(grads, expected, strict=True) if b is not None)

    assert set(Fleet(WORLD).run(main, preload=PRELOAD[ddp]).values()) == {True}
