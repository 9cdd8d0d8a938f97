"""When a slot takes part in the commit gate, and what it waits for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hotswap.core import messages as m
from hotswap.errors import Fenced
from hotswap.session.gate import CommitGate
from hotswap.session.mailbox import Mailbox
from hotswap.wire import worker_messages as w

GENERATION = 1


class Groups:
    """Counts gates, and lets every slot through."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.passed = 0

    def begin_gate(self, proposal: int) -> None:
        self.begun.append(proposal)

    def pass_gate(self) -> int:
        self.passed += 1
        assert self.passed == len(self.begun), "nobody passes a gate that it has not begun"
        return self.begun[-1] + 1


class Bench:
    def __init__(self) -> None:
        self.groups = Groups()
        self.mailbox = Mailbox(cast(Any, None))
        self.fence(GENERATION)
        self.gate = CommitGate(cast(Any, self.groups), self.mailbox)

    def fence(self, generation: int) -> None:
        self.put(m.Fence(generation=generation, places=("a#1",), endpoints={}))

    def ack(self, step: int) -> None:
        self.put(w.Acked(generation=self.mailbox.generation_told, step=step, free=0))

    def put(self, message: Any) -> None:
        """As the listening thread does."""
        self.mailbox.put(message)
        if hasattr(self, "gate"):
            self.gate.advance()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_step_that_ends_without_a_snapshot_has_nothing_to_wait_for(bench: Bench) -> None:
    bench.gate.arm(GENERATION, 5, needs=None, proposal=3)
    assert bench.groups.begun == [3]
    assert bench.gate.wait() == 4


def test_an_acknowledgement_in_the_middle_of_the_step_begins_the_gate(bench: Bench) -> None:
    bench.gate.arm(GENERATION, 5, needs=5, proposal=1)
    bench.ack(4)
    assert bench.groups.begun == []
    bench.ack(5)
    assert bench.groups.begun == [1]
    bench.ack(5)
    assert bench.gate.wait() == 2
    assert bench.groups.begun == [1]


def test_an_acknowledgement_that_came_before_the_step_counts(bench: Bench) -> None:
    bench.ack(5)
    bench.gate.arm(GENERATION, 5, needs=5, proposal=1)
    assert bench.groups.begun == [1]


def test_nobody_takes_part_for_a_generation_that_has_ended(bench: Bench) -> None:
    bench.gate.arm(GENERATION, 5, needs=5, proposal=1)
    bench.fence(GENERATION + 1)
    bench.ack(5)
    assert bench.groups.begun == []
    with pytest.raises(Fenced):
        bench.gate.wait()
    bench.gate.arm(GENERATION + 1, 5, needs=5, proposal=2)
    assert bench.groups.begun == [2]


@pytest.mark.parametrize("passed", [False, True])
def test_an_attempt_that_the_script_repeats_meets_the_same_gate(bench: Bench, passed: bool) -> None:
    bench.gate.arm(GENERATION, 5, needs=None, proposal=1)
    if passed:
        bench.gate.wait()
    bench.gate.arm(GENERATION, 5, needs=None, proposal=9)
    assert bench.gate.wait() == 2
    assert bench.groups.begun == [1]
    bench.gate.arm(GENERATION, 6, needs=None, proposal=4)
    assert bench.groups.begun == [1, 4]


def test_what_has_to_be_compared_before_holds_the_gate_back(bench: Bench) -> None:
    bench.ack(5)
    bench.gate.arm(GENERATION, 5, needs=5, proposal=1, at_wait=True)
    bench.ack(5)
    assert bench.groups.begun == []
    assert bench.gate.wait() == 2
