from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from hotswap.errors import IntegrityError, LayoutMismatch, UnsupportedState, UsageError
from hotswap.integrations import discover
from hotswap.replication.capture import Capture

Snapshot = tuple[bytearray, int, int]


class Program:
    """A few layers with dropout and batch norm; ``step`` is a function of the state alone."""

    def __init__(self, seed: int, width: int = 8, optimizer: str = "AdamW", **settings: Any) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-2, **settings)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.width = width
        self.capture = Capture(discover(self.model, self.optimizer, scheduler=self.scheduler))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, self.width) * random.random()).pow(2).mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def snap(self, step: int, slot: int = 3) -> Snapshot:
        buffer = bytearray(self.capture.nbytes())
        return (buffer, *self.capture.write(buffer, slot=slot, generation=7, step=step))

    def restore(self, snapshot: Snapshot, step: int, *, heavy: bool = True, slot: int = 3) -> None:
        self.capture.read(*snapshot, slot=slot, step=step, heavy=heavy)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("AdamW", {}),
        ("AdamW", {"foreach": True, "amsgrad": True}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("Rprop", {}),
    ],
)
def test_training_goes_on_from_any_snapshot_as_it_did(optimizer: str, settings: dict[str, Any]) -> None:
    program = Program(1, optimizer=optimizer, **settings)
    snapshots, digests = [program.snap(0)], [program.capture.digest()]
    for step in range(3):
        program.step()
        snapshots.append(program.snap(step + 1))
        digests.append(program.capture.digest())
    assert len(set(digests)) == 4
    for step in (0, 2, 1):
        program.restore(snapshots[step], step)
        assert program.capture.digest() == digests[step]
        program.step()
        assert program.capture.digest() == digests[step + 1]


def test_another_process_goes_on_in_its_place() -> None:
    first, second = Program(1), Program(2)
    first.step()
    snapshot = first.snap(1)
    second.restore(snapshot, 1)
    assert second.capture.digest() == first.capture.digest()
    state = random.getstate(), torch.get_rng_state()  # both live in this process and share its generators
    first.step()
    expected = first.capture.digest()
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    second.step()
    assert second.capture.digest() == expected


def test_restoring_keeps_tensors_where_they_are() -> None:
    program = Program(1)
    program.step()
    snapshot = program.snap(1)
    before = [(id(e.tensor), e.tensor.data_ptr()) for a in program.capture.adapters for e in a.tensors()]
    program.step()
    program.restore(snapshot, 1)
    assert before == [(id(e.tensor), e.tensor.data_ptr()) for a in program.capture.adapters for e in a.tensors()]


def test_a_snapshot_without_optimizer_state_takes_it_away() -> None:
    program = Program(1)
    snapshot = program.snap(0)
    program.step()
    assert program.optimizer.state
    program.restore(snapshot, 0)
    assert not program.optimizer.state


def test_light_restore_rolls_back_what_forward_changes_and_nothing_else() -> None:
    program = Program(1)
    program.step()
    snapshot, digest, digests = program.snap(1), program.capture.digest(), program.capture.digests()
    program.model(torch.randn(4, 8))
    assert program.capture.digest() != digest
    with torch.no_grad():
        program.model[0].weight.zero_()
    program.restore(snapshot, 1, heavy=False)
    assert program.capture.digests()["random"] == digests["random"]
    assert not program.model[0].weight.any()
    program.restore(snapshot, 1, heavy=True)
    assert program.capture.digest() == digest


@pytest.mark.parametrize("change", ["optimizer state", "buffer", "dtype", "parameter"])
def test_a_new_layout_is_made_when_tensors_are_other_objects(change: str) -> None:
    program = Program(1)
    program.step()
    program.snap(1)
    layout = program.capture.plan()
    assert program.capture.plan() is layout
    first = program.model[0].weight
    if change == "optimizer state":
        program.optimizer.state[first]["exp_avg"] = torch.ones_like(first)
    elif change == "buffer":
        program.model[1].running_mean = torch.full((16,), 5.0)
    elif change == "dtype":
        program.model[1].running_var.data = program.model[1].running_var.double()
    else:
        program.model.add_module("late", nn.Linear(2, 2))
    assert program.capture.plan() is not layout
    snapshot, digest = program.snap(1), program.capture.digest()
    with torch.no_grad():
        for entry in program.capture.adapters[0].tensors():
            entry.tensor.zero_()
    program.restore(snapshot, 1)
    assert program.capture.digest() == digest


def test_a_replaced_storage_is_read_from_its_new_place() -> None:
    program = Program(1)
    program.step()
    program.snap(1)
    program.model[0].weight.data = torch.full((16, 8), 2.5)
    snapshot = program.snap(1)
    program.model[0].weight.data.zero_()
    program.restore(snapshot, 1)
    assert bool((program.model[0].weight == 2.5).all())


@pytest.mark.parametrize(
    ("slot", "step", "error"), [(2, 1, "slot 3 at step 1, wanted was slot 2"), (3, 2, "wanted was slot 3 at step 2")]
)
def test_another_slot_or_step_is_refused(slot: int, step: int, error: str) -> None:
    program = Program(1)
    program.step()
    snapshot = program.snap(1)
    program.step()
    digest = program.capture.digest()
    with pytest.raises(LayoutMismatch, match=error):
        program.restore(snapshot, step, slot=slot)
    assert program.capture.digest() == digest


@pytest.mark.parametrize("heavy", [True, False])
@pytest.mark.parametrize("other", [{"width": 9}, {"optimizer": "SGD"}])
def test_another_program_is_refused_and_nothing_changes(other: dict[str, Any], heavy: bool) -> None:
    snapshot = Program(1).snap(1)
    program = Program(2, **other)
    program.step()
    program.snap(1)
    if "optimizer" in other:
        program = Program(3)
        program.capture = Capture(discover(program.model, program.optimizer))
    digest = program.capture.digest()
    with pytest.raises(LayoutMismatch):
        program.restore(snapshot, 1, heavy=heavy)
    assert program.capture.digest() == digest


def test_damaged_or_cut_snapshots_are_refused() -> None:
    program = Program(1)
    program.step()
    buffer, shared, unique = program.snap(1)
    digest = program.capture.digest()
    for damaged in (b"\xff" * 8 + bytes(buffer[8:]), bytes(8) + bytes(buffer[8:]), bytes(buffer[:200]), b""):
        program.step()
        program.restore((buffer, shared, unique), 1)
        with pytest.raises(IntegrityError):
            program.restore((bytearray(damaged), 0, len(damaged)), 1)
        assert program.capture.digest() == digest
    with pytest.raises(LayoutMismatch, match="bytes in a buffer of"):
        program.restore((buffer, shared + 64, unique), 1)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    program = Program(1)
    with pytest.raises(UsageError, match="does not fit"):
        program.capture.write(bytearray(program.capture.nbytes() - 1), slot=0, generation=0, step=0)


def test_the_sections_lengths_do_not_depend_on_the_values() -> None:
    program = Program(1)
    program.step()
    first = program.snap(1)
    for _ in range(5):
        program.step()
    assert program.snap(10**9)[1:] == first[1:]


def test_growing_objects_get_a_larger_header() -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def state_dict(self) -> dict[str, Any]:
            return {"lines": list(self.lines)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.lines = state["lines"]

    model, log = nn.Linear(2, 2), Log()
    capture = Capture(discover(model, torch.optim.SGD(model.parameters()), log=log))
    small = capture.nbytes()
    log.lines = ["x" * 100] * 1000
    large = capture.nbytes()
    assert large > small + 100_000
    buffer = bytearray(large)
    sections = capture.write(buffer, slot=0, generation=1, step=1)
    log.lines = []
    capture.read(buffer, *sections, slot=0, step=1, heavy=False)
    assert log.lines == ["x" * 100] * 1000


def test_state_that_cannot_travel_is_named() -> None:
    class Cursor:
        pass

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"x": [1, Cursor()]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = nn.Linear(2, 2)
    capture = Capture(discover(model, torch.optim.SGD(model.parameters()), loader=Loader()))
    with pytest.raises(UnsupportedState, match=r"state\['loader'\]\['state'\]\['x'\]\[1\] is a .*Cursor"):
        capture.nbytes()


def test_digest_does_not_depend_on_how_dicts_were_filled() -> None:
    class Counts:
        def __init__(self, order: list[str]) -> None:
            self.counts = {name: ord(name) for name in order}

        def state_dict(self) -> dict[str, Any]:
            return self.counts

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def digests(order: list[str]) -> dict[str, str]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        return Capture(discover(model, torch.optim.SGD(model.parameters()), counts=Counts(order))).digests()

    assert digests(["a", "b"]) == digests(["b", "a"])
    assert digests(["a", "b"])["counts"] != digests(["a", "c"])["counts"]


def test_a_scaler_used_in_a_failed_attempt_can_be_used_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    capture = Capture(discover(model, optimizer, scaler=scaler))

    def attempt() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)

    attempt()
    with pytest.raises(RuntimeError, match="already been called"):
        attempt()
    for adapter in capture.adapters:
        adapter.reset()
    attempt()
    scaler.step(optimizer)
    scaler.update()
