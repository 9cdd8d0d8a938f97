"""A busy mix of collectives and point-to-point traffic, as 3D-parallel training makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from comm_fleet import SlotProcess
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One slot's groups in a tensor 2 x data 2 x pipeline 2 layout."""

    tensor: ProcessGroup
    data: ProcessGroup
    pipeline: ProcessGroup
    stage: ProcessGroup
    next_stage: int
    is_first: bool


def make_mesh(slot: int) -> Mesh:
    """Create the groups of all eight slots, as c10d wants it, and pick this slot's."""
    tensor = [dist.new_group([2 * i, 2 * i + 1]) for i in range(4)]
    data = [dist.new_group([i, i ^ 2]) for i in (0, 1, 4, 5)]
    pipeline = [dist.new_group([i, i + 4]) for i in range(4)]
    stage = [dist.new_group([4 * i + k for k in range(4)]) for i in range(2)]
    return Mesh(
        tensor=tensor[slot // 2],
        data=data[(slot & 1) + (slot >> 2) * 2],
        pipeline=pipeline[slot & 3],
        stage=stage[slot >> 2],
        next_stage=slot ^ 4,
        is_first=slot < 4,
    )


def step(process: SlotProcess, mesh: Mesh, elements: int) -> float:
    """One step: activations forwards and gradients backwards through the pipeline, then data-parallel reductions."""
    here = torch.full((elements,), 1.0)
    there = torch.zeros(elements)
    for _ in range(2):
        process.groups.check()
        dist.all_reduce(here, group=mesh.tensor)
        here.div_(2)
        if mesh.is_first:
            dist.send(here, mesh.next_stage, group=mesh.pipeline)
            work = dist.irecv(there, mesh.next_stage, group=mesh.pipeline)
        else:
            dist.recv(there, mesh.next_stage, group=mesh.pipeline)
            work = dist.isend(here, mesh.next_stage, group=mesh.pipeline)
        assert work is not None
        work.wait()
    process.groups.check()
    shard = torch.zeros(elements // 2)
    reductions = [
        dist.reduce_scatter_tensor(shard, here, group=mesh.data, async_op=True),
        dist.all_reduce(there, group=mesh.stage, async_op=True),
    ]
    for reduction in reductions:
        assert reduction is not None
        reduction.wait()
    process.groups.gate()
    dist.all_gather_into_tensor(here, shard, group=mesh.data)
    return float(here[0])
