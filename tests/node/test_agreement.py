"""Which steps an agent keeps so that its slots have something to go back to when they differ."""

from __future__ import annotations

from collections.abc import Collection

from hotswap.core.integrity import NEVER
from hotswap.node.agreement import Agreement


class Kept:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.agreement = Agreement(self._keep)

    def _keep(self, steps: Collection[int]) -> None:
        self.steps = sorted(steps)


def test_what_is_compared_is_kept_beside_what_was_agreed_on() -> None:
    kept = Kept()
    kept.agreement.comparing(0, NEVER)
    assert kept.steps == [0]
    kept.agreement.reached(0)
    assert kept.steps == [0]
    kept.agreement.comparing(3, 0)
    assert kept.steps == [0, 3]
    kept.agreement.reached(3)
    assert kept.steps == [3]


def test_workers_of_one_node_speak_in_any_order() -> None:
    kept = Kept()
    kept.agreement.comparing(3, 0)
    kept.agreement.comparing(6, 3)
    kept.agreement.reached(3)  # another one, who has just heard it
    kept.agreement.comparing(3, 0)
    assert kept.steps == [3, 6]


def test_a_worker_that_is_new_does_not_make_its_node_forget() -> None:
    """Seed 5037: a worker that had been started again said that it knew of no agreement, and the state was overwritten."""
    kept = Kept()
    kept.agreement.comparing(4, 2)
    kept.agreement.comparing(4, NEVER)
    assert kept.steps == [2, 4]


def test_a_comparison_that_a_plan_has_ended_keeps_nothing() -> None:
    """Seed 6513: it held the buffer that the state was in which all had agreed on."""
    kept = Kept()
    kept.agreement.comparing(3, 2)
    kept.agreement.undo_after(4)
    assert kept.steps == [2]
    kept.agreement.undo_after(1)
    assert kept.steps == [1]


def test_before_the_first_agreement_nothing_is_kept() -> None:
    kept = Kept()
    kept.agreement.undo_after(7)
    assert kept.steps == [] and kept.agreement.step == NEVER
