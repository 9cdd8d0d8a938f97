"""A durable checkpoint that one number of slots has written, read by another: bit for bit the parts of the same whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_durable import write
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hotswap.errors import IntegrityError, LayoutMismatch, UsageError
from hotswap.integrations import discover
from hotswap.integrations.base import Place, place_of
from hotswap.replication import durable, durable_index, places
from hotswap.replication.capture import Capture
from hotswap.replication.resized import load_resized

# Over four slots: chunks of 2, 2, 2, 1 rows; of 2, 2, 1 and none; of 4 each.
SHAPES = {"uneven": (7, 3), "missing": (5,), "even": (16, 2)}
STEP = 3


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one of *size*; collectives do nothing. What torch remembers of the ranks before is forgotten."""
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Position:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def whole(name: str, what: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + what)
    return torch.randn(SHAPES[name], generator=generator)


def chunk(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    parts = torch.chunk(tensor, size)
    return parts[rank] if rank < len(parts) else tensor[:0]


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, size: int, rank: int, placements: Sequence[Any]) -> DTensor:
    part = chunk(tensor, rank, size).clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def trained(rank: int, size: int, *, steps: int, replicate: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Parameters sharded over all slots (or in *replicate* equal groups of them), after some updates."""
    shards = size // replicate
    mesh = DeviceMesh("cpu", torch.arange(size).reshape(replicate, shards))
    placements = (Replicate(), Shard(0))
    model = nn.Module()
    for name in SHAPES:
        value = sharded(whole(name, 0), mesh, shards, rank % shards, placements)
        model.register_parameter(name, nn.Parameter(value))
    model.register_buffer("seen", torch.tensor([float(rank)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = sharded(whole(name, step + 1), mesh, shards, rank % shards, placements)
        optimizer.step()
    return model, optimizer


def reference(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The whole parameters and first moments, by a process that shards nothing."""
    parameters = {name: nn.Parameter(whole(name, 0)) for name in SHAPES}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, foreach=True)
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = whole(name, step + 1)
        optimizer.step()
    return dict(parameters), {name: optimizer.state[p]["exp_avg"] for name, p in parameters.items()}


def save(directory: Path, size: int, **options: Any) -> None:
    for rank in range(size):
        with as_rank(rank, size):
            model, optimizer = trained(rank, size, steps=STEP, **options)
            torch.manual_seed(100 + rank)
            random.seed(100 + rank)
            capture = Capture(discover(model, optimizer, loader=Position(STEP)))
            buffer = bytearray(capture.nbytes())
            lengths = capture.write(buffer, slot=rank, generation=1, step=STEP)
            write((buffer, *lengths), directory, STEP, rank)
    durable_index.commit(directory, STEP, dict.fromkeys(range(size), 1))


def load(directory: Path, rank: int, size: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Position]:
    model, optimizer = trained(rank, size, steps=0, **options)
    position = Position(0)
    capture = Capture(discover(model, optimizer, loader=position))
    memory, shared, unique = load_resized(directory, STEP, rank, capture.specs())
    capture.read(memory, shared, unique, slot=rank, step=STEP, heavy=True)
    return model, optimizer, position


@pytest.mark.parametrize(("before", "now"), [(4, 2), (1, 4), (4, 3), (3, 4)])
def test_each_slot_gets_its_part_of_the_whole(before: int, now: int, tmp_path: Path) -> None:
    save(tmp_path, before)
    parameters, moments = reference(STEP)
    for rank in range(now):
        with as_rank(rank, now):
            model, optimizer, position = load(tmp_path, rank, now)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.to_local(), chunk(parameters[name], rank, now)), name
                assert torch.equal(optimizer.state[parameter]["exp_avg"].to_local(), chunk(moments[name], rank, now))
                assert optimizer.state[parameter]["step"] == STEP
            assert model.seen.tolist() == [rank % before]
            assert position.value == STEP


def test_slots_that_hold_the_same_are_read_once(tmp_path: Path) -> None:
    save(tmp_path, 4, replicate=2)
    parameters, _ = reference(STEP)
    for rank in range(2):
        with as_rank(rank, 2):
            model, *_ = load(tmp_path, rank, 2)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.to_local(), chunk(parameters[name], rank, 2)), name


def drawn() -> tuple[float, float]:
    return float(torch.rand(1)), random.random()


def test_random_generators_go_on_and_new_ones_are_apart(tmp_path: Path) -> None:
    save(tmp_path, 2)
    numbers = []
    for rank in (0, 1, 2, 3, 2, 3):
        with as_rank(rank, 4):
            load(tmp_path, rank, 4)
            numbers.append(drawn())
    for rank in range(2):
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        assert numbers[rank] == drawn()
    assert numbers[2:4] == numbers[4:6]
    assert len({number for pair in numbers for number in pair}) == 8


def test_a_position_in_ones_own_share_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            capture = Capture(discover(*trained(rank, 2, steps=0), loader=Position(rank)))
            buffer = bytearray(capture.nbytes())
            write((buffer, *capture.write(buffer, slot=rank, generation=1, step=0)), tmp_path, 0, rank)
    durable_index.commit(tmp_path, 0, {0: 1, 1: 1})
    with as_rank(0, 1), pytest.raises(UsageError, match="state of loader differs from slot to slot"):
        load_resized(tmp_path, 0, 0, Capture(discover(*trained(0, 1, steps=0))).specs())


def test_another_program_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with as_rank(0, 1):
        specs = Capture(discover(*trained(0, 1, steps=0))).specs()
        del specs["model/optimizer.0.0.1.param"]
        with pytest.raises(LayoutMismatch, match="not there in this process"):
            load_resized(tmp_path, STEP, 0, specs)
        plain = nn.ParameterDict({name: nn.Parameter(whole(name, 0)) for name in SHAPES})
        capture = Capture(discover(plain, torch.optim.AdamW(plain.parameters())))
        with pytest.raises(LayoutMismatch, match="whole in this process"):
            load_resized(tmp_path, STEP, 0, capture.specs())


def test_what_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = durable_index.slot_directory(tmp_path, STEP, 1) / places.FILE
    text = path.read_bytes()
    with as_rank(0, 1):
        specs = Capture(discover(*trained(0, 1, steps=0))).specs()
        path.write_bytes(text[::-1])
        with pytest.raises(IntegrityError, match="fails its checksum"):
            load_resized(tmp_path, STEP, 0, specs)


def test_a_part_that_nobody_has_is_missed(tmp_path: Path) -> None:
    with as_rank(0, 2):
        capture = Capture(discover(*trained(0, 2, steps=0)))
        buffer = bytearray(capture.nbytes())
        write((buffer, *capture.write(buffer, slot=0, generation=1, step=STEP)), tmp_path, STEP)
    durable_index.commit(tmp_path, STEP, {0: 1})
    with as_rank(0, 1), pytest.raises(IntegrityError, match=r"12 of the 21 elements of model/optimizer.0.0.0.param"):
        load_resized(tmp_path, STEP, 0, Capture(discover(*trained(0, 1, steps=0))).specs())


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / places.FILE
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(IntegrityError, match="another format"):
        places.read(path, durable_index.file_digest(path))


def test_who_cannot_be_resized_says_so() -> None:
    with as_rank(0, 2):
        plain = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="wrap it, or leave --min-nodes out"):
            Capture(discover(plain, torch.optim.SGD(plain.parameters()))).require_resizable()
        model, optimizer = trained(0, 2, steps=0)
        Capture(discover(model, optimizer)).require_resizable()
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        Capture(discover(wrapped, torch.optim.SGD(wrapped.parameters()))).require_resizable()
        alone = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0]))
        with pytest.raises(UsageError, match="joins only some of the slots"):
            Capture(discover(alone, torch.optim.SGD(alone.parameters()))).require_resizable()
        part = nn.Module()
        mesh = DeviceMesh("cpu", [0])
        part.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        with pytest.raises(UsageError, match="has only some of the slots"):
            Capture(discover(part, torch.optim.SGD(part.parameters()))).require_resizable()


def test_parts_whose_place_is_not_known_are_saved_but_not_resized() -> None:
    with as_rank(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(nn.Linear(4, 8), mesh["tensor"], ColwiseParallel())
        fully_shard(model, mesh=mesh["data"])
        capture = Capture(discover(model, torch.optim.SGD(model.parameters())))
        assert {spec.place for name, spec in capture.specs().items() if spec.is_dtensor} == {None}
        assert capture.write(bytearray(capture.nbytes()), slot=3, generation=1, step=STEP)
        with pytest.raises(UsageError, match="do not tell which part of it is where"):
            capture.require_resizable()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_places_are_those_that_torch_computes(world: int) -> None:
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", (world,))
            for shape in ((1, 3), (5, 2), (7,), (8, 4)):
                for placements in ([Shard(0)], [Replicate()]):
                    tensor = distribute_tensor(torch.zeros(shape), mesh, placements)
                    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
                    assert place_of(tensor) == Place(whole=shape, offset=tuple(offset))
                    assert tuple(tensor.to_local().shape) == tuple(size)


def test_the_same_number_of_slots_is_read_as_ever(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with as_rank(1, 2):
        memory, shared, unique = durable.load(tmp_path, STEP, 1)
        model, optimizer = trained(1, 2, steps=0)
        capture = Capture(discover(model, optimizer, loader=Position(0)))
        capture.read(memory, shared, unique, slot=1, step=STEP, heavy=True)
        parameters, _ = reference(STEP)
        assert torch.equal(model.uneven.to_local(), chunk(parameters["uneven"], 1, 2))
