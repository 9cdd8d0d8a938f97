"""A worker measures those parts of its steps in which it waits for nobody."""

from __future__ import annotations

import time

from hotswap.session.tempo import SAMPLES_MIN, SCRIPT, UPDATE, Tempo


class Steps:
    """A thread that trains; the operations it has started."""

    def __init__(self, every_s: float = 0.0) -> None:
        self.issued = 0
        self.tempo = Tempo(lambda: self.issued, every_s, on_device=False)

    def step(self, script_s: float, wait_s: float = 0.0, update_s: float = 0.0, *, operations: int = 1) -> None:
        self.tempo.begin()
        time.sleep(script_s)
        self.issued += operations
        time.sleep(wait_s)
        self.tempo.update()
        self.tempo.update()
        time.sleep(update_s)
        self.tempo.end()


def test_waiting_is_in_no_part() -> None:
    it = Steps()
    for _ in range(SAMPLES_MIN - 1):
        it.step(0.05, 0.3, 0.03)
    assert it.tempo.parts_s() == {}, "too few to tell"
    for _ in range(2):
        it.step(0.05, 0.3, 0.03)
    found = it.tempo.parts_s()
    assert 0.05 <= found[SCRIPT] < 0.3
    assert 0.03 <= found[UPDATE] < 0.3


def test_a_step_without_operations_has_no_such_part() -> None:
    it = Steps()
    for _ in range(2 * SAMPLES_MIN):
        it.step(0.01, operations=0)
    assert it.tempo.parts_s().keys() == {UPDATE}


def test_another_generation_begins_anew() -> None:
    it = Steps()
    for _ in range(2 * SAMPLES_MIN):
        it.step(0.02, 0.02)
    assert it.tempo.parts_s().keys() == {SCRIPT, UPDATE}
    it.tempo.begin()
    it.tempo.restart()
    it.issued += 1
    it.tempo.end()
    time.sleep(0.05)
    assert it.tempo.parts_s() == {}


def test_the_script_is_not_measured_more_often_than_asked_for() -> None:
    it = Steps(every_s=1000.0)
    for _ in range(2 * SAMPLES_MIN):
        it.step(0.01, 0.01)
    assert it.tempo.parts_s().keys() == {UPDATE}
