"""Whom somebody asks who looks for the coordinator that leads."""

from __future__ import annotations

from hotswap.core import messages as m
from hotswap.core.leader_search import LeaderSearch

ONE, TWO, THREE, ELSEWHERE = (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3), ("10.0.0.9", 9))


def follow(address: tuple[str, int], term: int = 1) -> m.Follow:
    return m.Follow(term=term, host=address[0], port=address[1])


def test_one_after_the_other() -> None:
    search = LeaderSearch([ONE, TWO, THREE])
    assert [search.next() for _ in range(4)] == [ONE, TWO, THREE, ONE]


def test_a_single_one_is_asked_again_and_may_be_alone() -> None:
    search = LeaderSearch([ONE])
    assert [search.next(), search.next()] == [ONE, ONE]
    assert not search.several
    assert search.accept(m.Lead(term=1))
    assert search.several, "one that is alone has no term"


def test_who_is_named_is_asked_once_and_then_not_its_own_turn() -> None:
    search = LeaderSearch([ONE, TWO, THREE])
    assert search.next() == ONE
    search.follow(follow(TWO))
    assert [search.next(), search.next()] == [TWO, THREE]
    search.follow(follow(ELSEWHERE))
    assert [search.next(), search.next()] == [ELSEWHERE, ONE]


def test_who_names_nobody_or_a_leader_of_long_ago_is_not_followed() -> None:
    search = LeaderSearch([ONE, TWO])
    assert search.next() == ONE
    assert search.accept(m.Lead(term=5)) and search.accept(m.Lead(term=5))
    assert not search.accept(m.Lead(term=4))
    assert search.term == 5
    search.follow(follow(ELSEWHERE, term=4))
    assert search.next() == TWO
    search.follow(m.Follow(term=6))
    assert search.next() == ONE
