from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.detector import SilenceDetector


def test_silence_counts_from_the_last_sign_of_life() -> None:
    detector = SilenceDetector(5.0)
    assert detector.deadline() is None
    detector.heard("a", 10.0)
    detector.heard("b", 12.0)
    assert detector.deadline() == 15.0
    assert detector.silent(14.9) == []
    assert detector.silent(15.0) == ["a"]
    assert detector.silent(20.0) == ["a", "b"]
    detector.forget("a")
    detector.forget("a")
    assert detector.deadline() == 17.0


def test_an_older_sign_of_life_does_not_count_back() -> None:
    detector = SilenceDetector(5.0)
    detector.heard("a", 10.0)
    detector.heard("a", 3.0)
    assert detector.deadline() == 15.0


def test_time_in_which_nobody_could_be_heard_is_nobodys_silence() -> None:
    detector = SilenceDetector(5.0)
    detector.heard("a", 10.0)
    detector.heard("b", 21.0)
    detector.excuse(8.0, 22.0)
    assert detector.silent(22.9) == []
    assert detector.silent(23.0) == ["a"]
    assert detector.silent(27.0) == ["a", "b"], "nobody was heard in the future"


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError):
        SilenceDetector(0.0)


@given(
    st.floats(0.1, 10.0),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 100.0)), min_size=1),
)
def test_at_its_deadline_somebody_is_silent(budget_s: float, signs: list[tuple[str, float]]) -> None:
    detector = SilenceDetector(budget_s)
    for node, now in signs:
        detector.heard(node, now)
    due = detector.deadline()
    assert due is not None
    assert detector.silent(due)
    assert not detector.silent(due - budget_s * 0.01)


def test_how_long_a_node_has_been_silent() -> None:
    detector = SilenceDetector(2.0)
    detector.heard("a", 1.0)
    assert detector.silence("a", 1.5) == 0.5
    assert detector.silence("b", 1.5) == float("inf")
