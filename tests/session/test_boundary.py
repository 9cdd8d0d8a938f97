"""Halting at a step boundary: what the gate agrees on, and what a worker does there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from session_kit import Server, worker

from hotswap.core import messages as m
from hotswap.session.boundary import Boundary
from hotswap.session.mailbox import Mailbox
from hotswap.wire import worker_messages as w


def boundary(*told: Any) -> Boundary:
    mailbox = Mailbox(cast(Any, None))
    mailbox.put(m.Fence(generation=1, places=(), endpoints={}))
    for message in told:
        mailbox.put(message)
    return Boundary(mailbox)


def test_one_that_was_told_tells_all_and_all_halt_at_the_same_step() -> None:
    told, other = boundary(m.Halt(generation=1)), boundary()
    assert other.proposal(3) == 3
    for step in (5, 6):  # It says so at both gates before the halt, and that changes nothing.
        said = max(told.proposal(1), other.proposal(3))
        assert [each.agree(said, step, interval) for each, interval in ((told, 2), (other, 2))] == [2, 2]
        assert {told.at, other.at} == {7}
    told.arrive()
    other.arrive()
    assert told.proposal(4) == 4
    assert told.agree(4, 7, 2) == 4 and told.at == 7


def test_a_durable_checkpoint_is_agreed_on_as_well() -> None:
    told, other = boundary(m.Halt(generation=1, durable=True)), boundary(m.Halt(generation=1))
    said = max(told.proposal(1), other.proposal(64))
    assert [each.agree(said, 0, 1) for each in (told, other)] == [1, 1]
    assert told.durable and other.durable and other.halts_at(2)
    other.restart()
    assert not other.durable and not other.halts_at(2)


def test_an_order_of_another_generation_is_nothing() -> None:
    assert boundary(m.Halt(generation=2)).proposal(1) == 1


def test_it_stands_still_with_a_snapshot_that_is_safe_until_the_generation_ends(server: Server, tmp_path: Path) -> None:
    # Snapshots are far apart: the halt asks for one of its own, at the step after the one whose gate has agreed.
    with worker(server, tmp_path, snapshot_interval_steps=50, halt_s=1000.0) as it:
        it.start()
        it.say(m.Halt(generation=1))
        it.ack(0)
        halted_at = it.hear(w.SnapshotDone).step
        it.silent()
        it.ack(halted_at)
        assert it.hear(w.Halted) == w.Halted(generation=1, step=halted_at)
        it.silent()
        assert len(it.noted("attempt")) == halted_at
        it.fence(2)
        parked = it.hear(w.Parked)
        assert (parked.step, parked.dirty, parked.torn) == (halted_at, False, False)


def test_it_goes_on_if_no_other_membership_comes(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, halt_s=0.1) as it:
        it.start()
        it.say(m.Halt(generation=1))
        it.train(range(2))
        it.ack(2)
        assert it.hear(w.Halted).step == 2
        it.snapshot(3)
        it.train(range(3, 4))
        it.ack(4)
        assert it.status() == 0
        assert len(it.noted("attempt")) == 4
