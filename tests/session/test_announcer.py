"""A snapshot that a device is still copying becomes valid when it is whole, or never once the generation has ended."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from hotswap.core import messages as m
from hotswap.session.mailbox import Mailbox
from hotswap.session.snapshots import Announcer, Snapshots, Written
from hotswap.wire.links import WorkerLink


class Copy:
    """Stands for the event behind a device's copies."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = threading.Event(), error

    def synchronize(self) -> None:
        assert self.done.wait(5.0)
        if self.error:
            raise RuntimeError(self.error)


class Announced:
    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def announce(self, written: Written, *, durable: bool) -> None:
        self.steps.append((written.step, durable))


def written(step: int, copied: Any) -> Written:
    return Written(generation=1, step=step, buffer=0, shared_nbytes=0, unique_nbytes=1, copied=copied)


def fence(generation: int) -> m.Fence:
    return m.Fence(generation=generation, places=("a#1",), endpoints={})


@pytest.fixture
def mailbox() -> Mailbox:
    made = Mailbox(cast(WorkerLink, None))
    made.put(fence(1))
    return made


def until(condition: Any) -> None:
    end = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_without_a_device_it_is_announced_at_once(mailbox: Mailbox) -> None:
    announced = Announced()
    announcer = Announcer(cast(Snapshots, announced), mailbox)
    announcer.add(written(3, None), durable=True)
    assert announced.steps == [(3, True)]
    assert announcer.pending is None


def test_it_is_announced_when_the_copies_are_done(mailbox: Mailbox) -> None:
    announced, copy = Announced(), Copy()
    announcer = Announcer(cast(Snapshots, announced), mailbox)
    announcer.add(written(3, copy), durable=False)
    assert announcer.pending is not None
    assert announced.steps == []
    copy.done.set()
    until(lambda: announcer.pending is None)
    assert announced.steps == [(3, False)]


def test_copies_that_are_done_after_the_fence_are_void_and_the_next_generation_goes_on(mailbox: Mailbox) -> None:
    announced, old, new = Announced(), Copy(), Copy()
    announcer = Announcer(cast(Snapshots, announced), mailbox)
    announcer.add(written(3, old), durable=False)
    mailbox.put(fence(2))
    old.done.set()
    later = Written(generation=2, step=3, buffer=1, shared_nbytes=0, unique_nbytes=1, copied=new)
    with mailbox.lock:
        # It stays pending until then: the worker reports its state as torn.
        assert announcer.pending is not None
        announcer.add(later, durable=False)
    new.done.set()
    until(lambda: announcer.pending is None)
    assert announced.steps == [(3, False)]


def test_a_device_error_makes_nothing_valid_and_the_thread_goes_on(mailbox: Mailbox) -> None:
    announced, broken, whole = Announced(), Copy("CUDA error"), Copy()
    announcer = Announcer(cast(Snapshots, announced), mailbox)
    for step, copy in ((3, broken), (4, whole)):
        announcer.add(written(step, copy), durable=False)
        copy.done.set()
    until(lambda: announced.steps)
    assert announced.steps == [(4, False)]
