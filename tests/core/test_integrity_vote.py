"""Who differs from most of its peers, and where state comes from then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_resume import ledger, own, replica, worker

from hotswap.core.integrity import Vote, vote
from hotswap.core.resume import choose
from hotswap.core.types import Source, SourceKind, Suspicion


def test_who_is_alone_with_its_state_is_odd() -> None:
    assert vote({0: [(7, 1)], 1: [(7, 2)], 2: [(7, 1)]}) == Vote(odd=(1,))
    assert vote({0: [(7, 1)], 1: [(7, 1)], 2: [(7, 1)]}).agreed
    assert vote({slot: [(7, 3 if slot in (1, 4) else 1)] for slot in range(5)}) == Vote(odd=(1, 4))


def test_without_a_majority_nobody_is_right() -> None:
    assert vote({0: [(7, 1)], 1: [(7, 2)]}) == Vote(undecided=(0, 1))
    assert vote({0: [(7, 1)], 1: [(7, 2)], 2: [(7, 3)]}) == Vote(undecided=(0, 1, 2))
    assert vote({slot: [(7, slot % 2)] for slot in range(4)}) == Vote(undecided=(0, 1, 2, 3))


def test_each_group_votes_for_itself() -> None:
    ballots = {
        0: [(1, 5), (8, 1)],
        1: [(1, 5), (9, 2)],
        2: [(1, 6), (9, 2)],
        3: [(1, 5), (9, 4)],
        4: [(8, 2)],
        5: [],
    }
    assert vote(ballots) == Vote(odd=(2, 3), undecided=(0, 4))


@given(
    st.integers(3, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=(n - 1) // 2)))
)
def test_a_minority_never_outvotes_the_rest(case: tuple[int, set[int]]) -> None:
    count, wrong = case
    found = vote({slot: [(1, 100 + slot if slot in wrong else 0)] for slot in range(count)})
    assert found == Vote(odd=tuple(sorted(wrong)))


# --- where state comes from ------------------------------------------------------------------------------------------


def test_nothing_newer_than_the_last_agreement_counts() -> None:
    book = ledger({"a": [own(0, 4), own(0, 5)], "b": [own(1, 4), own(1, 5)]}, [worker(0, 5), worker(1, 5)])
    book.suspicion = Suspicion(verified=4, odd=(1,))
    assert book.steps() == [4]
    choice = choose(range(2), book)
    assert choice is not None and choice.step == 4
    book.suspicion = Suspicion(verified=3)
    assert choose(range(2), book) is None


def test_an_odd_slot_takes_its_state_from_others_if_they_have_it() -> None:
    book = ledger(
        {"a": [own(0, 4, shared=9)], "b": [own(1, 4, shared=9)], "c": [replica(1, 4, shared=9)]}, [worker(1, 4)]
    )
    book.peers = {0: (1,), 1: (0,)}
    assert book.source(1, 4) == Source(kind=SourceKind.LIVE)
    book.suspicion = Suspicion(verified=4, odd=(1,))
    from_others = Source(
        kind=SourceKind.REPLICA,
        unique_from="c",
        unique_nbytes=8,
        shared_from="a",
        shared_slot=0,
        shared_nbytes=9,
    )
    assert book.source(1, 4) == from_others
    assert book.source(0, 4) == Source(kind=SourceKind.OWN), "its peer is not in doubt"
    book.replicas.clear()
    assert book.source(1, 4) == Source(kind=SourceKind.OWN), "better than nothing: it was compared when it was made"
    book.own.clear()
    assert book.source(1, 4) is None
