"""What a slot hashes, when, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from hotswap.errors import Fenced, PeerUnreachable, UsageError
from hotswap.integrations.base import AdapterBase, TensorEntry
from hotswap.replication.capture import Capture
from hotswap.session.integrity import GROUPS_MAX, Comparison
from hotswap.session.settings import WorkerSettings
from hotswap.wire import worker_messages as w


class Shares(AdapterBase):
    """Tensors shared with other slots."""

    def __init__(self, parts: dict[tuple[int, ...], list[torch.Tensor]]) -> None:
        super().__init__("model")
        self.parts = parts

    def compared(self) -> list[tuple[tuple[int, ...], list[TensorEntry]]]:
        return [
            (peers, [TensorEntry(name=f"{index}", tensor=tensor, shared=True) for index, tensor in enumerate(tensors)])
            for peers, tensors in self.parts.items()
        ]


@dataclass
class Wire:
    """In the place of the agent, its mailbox and the other slots, whose rows are made from this one's."""

    others: list[Any] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    waits: int = 0
    gone: str = ""

    def send(self, message: Any) -> None:
        self.said.append(message)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return [numbers, *[other(list(numbers)) for other in self.others]]

    def wait(self, generation: int, get: Any, timeout_s: float) -> None:
        self.waits += 1
        if self.waits < 3:
            raise PeerUnreachable("no answer")
        raise Fenced("another generation")


def comparison(wire: Any, every: int = 2) -> Comparison:
    settings = WorkerSettings(slot=0, world_size=3, link_fd=-1, integrity_every_steps=every)
    return Comparison(wire, wire, wire, settings)


def state(tensors: dict[tuple[int, ...], list[torch.Tensor]]) -> Capture:
    return cast(Capture, Capture([Shares(tensors)]))


def same(numbers: list[int]) -> list[int]:
    return numbers


def other(numbers: list[int]) -> list[int]:
    """Differs in the last tensor of the first group, and so in that group's number."""
    if len(numbers) == 2 + 2 * GROUPS_MAX:
        numbers[3] += 1
    else:
        numbers[-1] += 1
    return numbers


def test_what_is_compared_when() -> None:
    wire = Wire([same, same])
    it, here = comparison(wire), state({(1, 2): [torch.ones(3), torch.zeros(2)]})
    for step in range(6):
        it.conclude(7)
        it.begin(7, here, step, durable=step in (3, 5))
    assert [m.step for m in wire.said if isinstance(m, w.Comparing)] == [0, 2, 3, 5]
    told = [m for m in wire.said if isinstance(m, w.Compared)]
    assert [(m.step, m.verified, m.durable) for m in told] == [(0, 0, False), (2, 2, False), (3, 3, True)]
    it.settle(7, here, 6, durable=False)
    assert [m.step for m in wire.said if isinstance(m, w.Compared)] == [0, 2, 3, 5, 6]


def test_after_a_restore_the_state_is_compared_first_and_does_not_become_durable_again() -> None:
    wire = Wire([same, same])
    it, here = comparison(wire, every=100), state({(1, 2): [torch.ones(3)]})
    it.begin(1, here, 4, durable=False)
    it.conclude(1)
    it.begin(1, here, 5, durable=True)
    it.restart(4)
    it.conclude(2)
    it.begin(2, here, 4, durable=True)
    it.conclude(2)
    assert wire.said[-1] == w.Compared(generation=2, step=4, verified=4)
    it.restart(2)
    it.begin(3, here, 2, durable=False)
    assert wire.said[-1] == w.Comparing(generation=3, step=2, verified=2), "what was undone was never found equal"


def test_nothing_is_done_without_the_option() -> None:
    wire = Wire()
    it, here = comparison(wire, every=0), state({(1, 2): [torch.ones(3)]})
    it.begin(1, here, 0, durable=True)
    it.settle(1, here, 1, durable=True)
    assert not wire.said and not it.on


def test_a_difference_is_said_again_until_another_generation_begins() -> None:
    wire = Wire([same, other])
    it, here = comparison(wire), state({(1, 2): [torch.ones(3), torch.zeros(2)]})
    it.begin(1, here, 4, durable=True)
    with pytest.raises(Fenced):
        it.conclude(1)
    told = [m for m in wire.said if isinstance(m, w.Compared)]
    assert len(told) == wire.waits == 3
    assert (told[0].odd, told[0].undecided, told[0].verified, told[0].detail) == ((2,), (), -1, "model/1")
    wire.gone, wire.waits = "the agent is gone", 0
    it.begin(1, here, 6, durable=False)
    with pytest.raises(PeerUnreachable):
        it.conclude(1)


def test_many_tensors_are_not_all_named_and_two_that_differ_are_undecided() -> None:
    def all_other(numbers: list[int]) -> list[int]:
        return [number + 1 for number in numbers] if len(numbers) == 5 else other(numbers)

    wire = Wire([all_other])
    it, here = comparison(wire), state({(1,): [torch.full((2,), float(n)) for n in range(5)]})
    it.begin(1, here, 0, durable=False)
    with pytest.raises(Fenced):
        it.conclude(1)
    assert wire.said[-1].undecided == (0, 1)
    assert wire.said[-1].detail == "model/0, model/1, model/2 and 2 more"


def test_that_there_is_nothing_to_compare_is_said(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire([lambda numbers: [-1, 0, *[0] * (2 * GROUPS_MAX)]])
    it = comparison(wire)
    it.begin(1, state({}), 0, durable=False)
    it.conclude(1)
    assert "no two slots hold the same state" in caplog.text


def test_a_slot_that_shares_with_too_many_groups_is_refused() -> None:
    parts = {(peer,): [torch.ones(1)] for peer in range(1, GROUPS_MAX + 2)}
    with pytest.raises(UsageError, match="can be compared"):
        comparison(Wire()).begin(1, state(parts), 0, durable=False)
