from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hotswap.errors import LayoutMismatch, UsageError
from hotswap.integrations import TensorSpec, discover, forget_frames
from hotswap.integrations.modules import ModuleAdapter, _best_peers
from hotswap.integrations.pins import PINS, require_fields


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_plain_model_its_extras_and_the_generators_last() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    adapters = discover(model, optimizer, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert [adapter.name for adapter in adapters] == ["model", "scheduler", "random"]
    assert adapters[0].optimizers() == [optimizer]
    assert not any(adapter.peers() for adapter in adapters)


def test_several_chunks_and_optimizers() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 3)]
    adapter = discover(chunks, [sgd(chunk) for chunk in chunks])[0]
    assert [entry.name for entry in adapter.tensors()] == [
        "optimizer.0.0.0.param",
        "optimizer.0.0.1.param",
        "optimizer.1.0.0.param",
        "optimizer.1.0.1.param",
    ]


def test_a_compiled_module_is_its_original() -> None:
    model = nn.Linear(2, 2)
    assert isinstance(discover(torch.compile(model, backend="eager"), sgd(model))[0], ModuleAdapter)


class Wrapped(torch.Tensor):
    pass


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """By the name that counts."""


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (3, None, "model is a"),
        ([], None, "no chunks"),
        ([object()], None, "model is a object"),
        (nn.DataParallel(nn.Linear(2, 2)), None, "use DistributedDataParallel"),
        (nn.Linear(2, 2), [object()], "optimizer is a object"),
        (
            nn.Linear(2, 2),
            ZeroRedundancyOptimizer([torch.zeros(1)], lr=1.0),
            "ZeroRedundancyOptimizer is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_the_way_out(model: Any, optimizer: Any, message: str) -> None:
    with pytest.raises((UsageError, TypeError), match=message if model != 3 else "int"):
        discover(model, optimizer)


def test_a_loader_without_a_position_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="loader is a list without state_dict and load_state_dict"):
        discover(model, sgd(model), loader=[1, 2])
    with pytest.raises(UsageError, match="'random' is taken"):
        discover(model, sgd(model), random=torch.amp.GradScaler("cpu"))


def test_tensors_that_cannot_be_copied_bit_for_bit_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(2).as_subclass(Wrapped))
    with pytest.raises(UsageError, match=r"type .*Wrapped cannot be captured"):
        discover(model, sgd(model))[0].tensors()
    model.odd = torch.zeros(1).expand(5)
    with pytest.raises(UsageError, match=r"buffer\.0\.odd is an expanded view"):
        discover(model, sgd(model))[0].tensors()


def test_frozen_parameters_and_buffers_are_covered_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.tied = model[0]
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    adapter = discover(model, optimizer)[0]
    names = [entry.name for entry in adapter.tensors()]
    assert names[:4] == [
        "model.0.0.bias",
        "buffer.0.1.running_mean",
        "buffer.0.1.running_var",
        "buffer.0.1.num_batches_tracked",
    ]
    assert [e.name for e in adapter.tensors() if e.volatile] == names[1:4]
    assert len(names) == 7


def test_extra_state_travels() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    model = nn.Sequential(Counting(2, 2))
    adapter = discover(model, sgd(model))[0]
    model[0].count = 5
    tree = adapter.objects()
    model[0].count = 6
    adapter.load_objects(tree)
    assert model[0].count == 5


def test_scalars_of_groups_are_exact_and_tensors_stay_in_place() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    adapter = discover(model, optimizer)[0]
    tree = adapter.objects()
    tree["optimizers"][0]["groups"][0]["lr"] = torch.tensor(0.1)
    optimizer.param_groups[0].update(lr=rate, late=1)
    rate.fill_(0.7)
    adapter.load_objects(tree)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)
    assert "late" not in optimizer.param_groups[0]


def test_state_for_a_parameter_that_is_not_there_is_refused() -> None:
    model = nn.Linear(2, 2)
    adapter = discover(model, sgd(model))[0]
    wanted = {entry.name: entry.spec() for entry in adapter.tensors()}
    adapter.check(wanted)
    spec = TensorSpec(dtype=torch.float32, shape=(2,), device_type="cpu", is_dtensor=False)
    adapter.check({**wanted, "optimizer.0.0.1.state.momentum": spec})
    with pytest.raises(LayoutMismatch, match="no such parameter"):
        adapter.check({**wanted, "optimizer.0.0.7.state.momentum": spec})
    with pytest.raises(LayoutMismatch, match="in the snapshot but not in this process"):
        adapter.check({**wanted, "model.0.extra": spec})
    with pytest.raises(LayoutMismatch, match="in this process but not in the snapshot"):
        adapter.check({name: s for name, s in wanted.items() if not name.endswith("1.param")})


def test_the_shape_tells_programs_apart() -> None:
    def shape(width: int, kind: str = "SGD") -> str:
        model = nn.Linear(2, width)
        return discover(model, getattr(torch.optim, kind)(model.parameters(), lr=0.1))[0].shape()

    assert shape(2) == shape(2)
    assert len({shape(2), shape(3), shape(2, "Adam")}) == 3


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([], ()),
        ([((), 10)], ()),
        ([((1, 2), 10), ((), 99)], (1, 2)),
        ([((1, 2, 3), 10), ((2,), 5)], (2,)),
        ([((1, 2, 3), 10), ((4,), 5)], (1, 2, 3)),
        ([((1, 2), 10), ((2, 3), 10)], (2,)),
    ],
)
def test_peers_are_those_that_hold_the_most(
    holders: list[tuple[tuple[int, ...], int]], expected: tuple[int, ...]
) -> None:
    assert _best_peers(holders) == expected


def test_pins_name_the_version_and_the_field() -> None:
    class Reducer:
        _reset_state = _rebuild_buckets = None

    with pytest.raises(
        UsageError, match=r"torch 2.13.0: .*Reducer has no _get_zeros_like_grad_buckets, _remove_autograd"
    ):
        require_fields("torch", ["2.13.0", "cpu"][0], "Reducer", Reducer())
    with pytest.raises(
        UsageError, match=r"torch 3.0.1 is not supported \(Reducer\): install a version from 2.11 to below"
    ):
        require_fields("torch", "3.0.1", "Reducer", Reducer())
    require_fields("torch", torch.__version__, "Reducer", torch.distributed.Reducer)
    assert all(pin.fields and pin.first < pin.end for pin in PINS)


def test_forgotten_frames_end_contexts_entered_by_hand() -> None:
    ended = []

    @contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(True)

    def schedule() -> None:
        entered = context()
        entered.__enter__()
        raise RuntimeError("a peer died")

    def attempt() -> None:
        try:
            schedule()
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    try:
        attempt()
    except ValueError as error:
        kept = error
    gc.collect()
    assert ended == []
    forget_frames(kept)
    assert ended == [True]
    assert "schedule" in "".join(traceback.format_exception(kept))
