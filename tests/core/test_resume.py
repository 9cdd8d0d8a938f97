"""Which step to resume from, against an oracle that knows nothing of the implementation."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.resume import Ledger, both_ways, choose, redone_steps
from hotswap.core.types import Held, HeldKind, Source, SourceKind, WorkerState

SLOTS = range(2)


def own(slot: int, step: int, shared: int = 0) -> Held:
    return Held(slot=slot, step=step, kind=HeldKind.OWN, shared_nbytes=shared, unique_nbytes=8)


def replica(slot: int, step: int, shared: int = 0) -> Held:
    return Held(slot=slot, step=step, kind=HeldKind.REPLICA, shared_nbytes=shared, unique_nbytes=8)


def worker(slot: int, step: int, *, dirty: bool = False, torn: bool = False) -> WorkerState:
    return WorkerState(slot=slot, step=step, dirty=dirty, torn=torn)


def ledger(held: dict[str, list[Held]], live: list[WorkerState] | None = None, hosted: str = "ab") -> Ledger:
    """Slot 0 is on node a, slot 1 on node b."""
    made = Ledger(live={state.slot: state for state in live or []})
    for node, items in held.items():
        made.add(node, items, [hosted.index(node)] if node in hosted else [])
    return made


# --- one slot at a time ----------------------------------------------------------------------------------------------


def test_a_survivor_at_the_step_touches_nothing() -> None:
    assert ledger({}, [worker(0, 4)]).source(0, 4) == Source(kind=SourceKind.LIVE)


def test_a_begun_attempt_is_taken_back_with_the_own_snapshot() -> None:
    dirty = [worker(0, 4, dirty=True)]
    assert ledger({"a": [own(0, 4)]}, dirty).source(0, 4) == Source(kind=SourceKind.LIVE)
    assert ledger({}, dirty).source(0, 4) is None
    assert ledger({"b": [replica(0, 4)]}, dirty).source(0, 4) == Source(
        kind=SourceKind.REPLICA, unique_from="b", unique_nbytes=8
    )


def test_a_torn_survivor_is_no_source() -> None:
    torn = [worker(0, 4, torn=True, dirty=True)]
    assert ledger({}, torn).source(0, 4) is None
    assert ledger({"a": [own(0, 4)]}, torn).source(0, 4) == Source(kind=SourceKind.OWN)


def test_a_survivor_that_moved_on_goes_back() -> None:
    assert ledger({"a": [own(0, 4), own(0, 5)]}, [worker(0, 5)]).source(0, 4) == Source(kind=SourceKind.OWN)


def test_snapshots_from_when_a_node_had_the_slot_are_as_good_as_replicas() -> None:
    assert ledger({"c": [own(0, 4)]}).source(0, 4) == Source(kind=SourceKind.REPLICA, unique_from="c", unique_nbytes=8)


def test_a_lost_slot_takes_its_unique_part_from_a_replica_and_the_rest_from_a_peer() -> None:
    book = ledger({"b": [replica(0, 4, shared=9), own(1, 4, shared=9)]})
    book.peers = {0: (1,)}
    assert book.source(0, 4) == Source(
        kind=SourceKind.REPLICA, unique_from="b", unique_nbytes=8, shared_from="b", shared_slot=1, shared_nbytes=9
    )


def test_a_peer_without_that_step_or_with_another_length_is_no_source() -> None:
    for held in ([own(1, 5, shared=9)], [own(1, 4, shared=10)], []):
        book = ledger({"b": [replica(0, 4, shared=9), *held]})
        book.peers = {0: (1,)}
        assert book.source(0, 4) is None
    assert ledger({"b": [replica(0, 4, shared=9), own(1, 4, shared=9)]}).source(0, 4) is None


def test_peers_know_each_other_both_ways() -> None:
    assert both_ways({0: (1, 2), 5: (5,), 6: ()}) == {0: (1, 2), 1: (0,), 2: (0,), 5: ()}


def test_what_failed_is_not_used_again() -> None:
    book = ledger({"a": [own(0, 4)], "b": [replica(0, 4)]}, [worker(0, 4)])
    book.distrust(0, 4, "c")
    assert book.source(0, 4) == Source(kind=SourceKind.LIVE)
    book.distrust(0, 4, "a")
    assert book.source(0, 4) == Source(kind=SourceKind.REPLICA, unique_from="b", unique_nbytes=8)
    book.distrust(0, 4, "b")
    book.distrust(1, 4, "b")
    assert book.source(0, 4) is None


# --- all slots together ----------------------------------------------------------------------------------------------


def test_the_newest_common_step_is_chosen() -> None:
    book = ledger({"a": [own(0, 3), own(0, 4)], "b": [own(1, 2), own(1, 3)]}, [worker(0, 4), worker(1, 3)])
    choice = choose(SLOTS, book)
    assert choice is not None
    assert choice.step == 3
    assert {slot: source.kind for slot, source in choice.sources.items()} == {0: SourceKind.OWN, 1: SourceKind.LIVE}


def test_no_common_step_is_no_step() -> None:
    assert choose(SLOTS, ledger({"a": [own(0, 4)], "b": [own(1, 3)]})) is None
    assert choose(SLOTS, Ledger()) is None


def test_an_untouched_job_has_not_trained() -> None:
    assert not ledger({"a": [own(0, 0)]}, [worker(0, 0)]).trained()
    assert ledger({"a": [own(0, 1)]}).trained()
    assert ledger({}, [worker(0, 0, dirty=True)]).trained()
    assert ledger({}, [worker(0, 0, torn=True)]).trained()
    assert ledger({}, [worker(0, 1, torn=True)]).trained()


def test_steps_begun_are_steps_done_again() -> None:
    live = {0: worker(0, 6, dirty=True), 1: worker(1, 5)}
    assert redone_steps(live, 5) == 2
    assert redone_steps(live, 7) == 0
    assert redone_steps({}, 3) == 0


# --- against an oracle -----------------------------------------------------------------------------------------------

Facts = tuple[tuple[bool, ...], ...]


def restorable(slot: int, step: int, facts: dict[tuple[str, int, int], bool], states: dict[int, WorkerState]) -> bool:
    """Straight from the rule: alive and exactly there, or own snapshot, or replica and, if need be, a peer's shared part."""
    state = states.get(slot)
    untouched = state is not None and (state.step, state.dirty, state.torn) == (step, False, False)
    has_replica = facts["replica", slot, step] and (not facts["shared", slot, 0] or facts["own", 1 - slot, step])
    return untouched or facts["own", slot, step] or has_replica


def check(facts: dict[tuple[str, int, int], bool], states: dict[int, WorkerState]) -> None:
    book = Ledger(live=dict(states), peers={0: (1,), 1: (0,)})
    for slot, node in enumerate("ab"):
        shared = 7 * facts["shared", slot, 0]
        book.add(node, [own(slot, step, 7) for step in (0, 1) if facts["own", slot, step]], [slot])
        book.add("c", [replica(slot, step, shared) for step in (0, 1) if facts["replica", slot, step]], [])
    good = [step for step in (0, 1) if all(restorable(slot, step, facts, states) for slot in SLOTS)]
    choice = choose(SLOTS, book)
    assert (choice.step if choice is not None else None) == max(good, default=None)
    if choice is not None:
        for slot, source in choice.sources.items():
            check_source(slot, choice.step, source, facts, states)


def check_source(
    slot: int, step: int, source: Source, facts: dict[tuple[str, int, int], bool], states: dict[int, WorkerState]
) -> None:
    """Every source really has what it is chosen for."""
    if source.kind is SourceKind.LIVE:
        state = states[slot]
        assert (state.step, state.torn) == (step, False)
        assert not state.dirty or facts["own", slot, step]
    elif source.kind is SourceKind.OWN:
        assert facts["own", slot, step]
    else:
        assert facts["replica", slot, step]
        assert source.unique_from == "c"
        assert (source.shared_slot >= 0) == facts["shared", slot, 0]
        assert source.shared_slot < 0 or facts["own", source.shared_slot, step]


CONDITIONS = [None, *product((0, 1), (False, True), (False, True))]


def test_every_small_case() -> None:
    """Two slots, two steps: all combinations of what is held and how the workers stand."""
    keys = [(kind, slot, step) for kind in ("own", "replica") for slot in SLOTS for step in (0, 1)]
    for values in product((False, True), repeat=len(keys)):
        facts = {**dict(zip(keys, values, strict=True)), ("shared", 0, 0): True, ("shared", 1, 0): False}
        for conditions in product(CONDITIONS[::2], CONDITIONS[1::3]):
            states = {
                slot: worker(slot, condition[0], dirty=condition[1], torn=condition[2])
                for slot, condition in enumerate(conditions)
                if condition is not None
            }
            check(facts, states)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_larger_cases(data: st.DataObject) -> None:
    """More slots and steps; the oracle again goes by the rule alone."""
    slots, steps = range(data.draw(st.integers(1, 4))), range(5)
    things = st.sets(st.tuples(st.sampled_from(slots), st.sampled_from(steps)))
    owned, copied = data.draw(things), data.draw(things)
    states = {
        slot: worker(
            slot, data.draw(st.sampled_from(steps)), dirty=data.draw(st.booleans()), torn=data.draw(st.booleans())
        )
        for slot in slots
        if data.draw(st.booleans())
    }
    book = Ledger(live=dict(states))
    for slot in slots:
        book.add(f"n{slot}", [own(s, step) for s, step in sorted(owned) if s == slot], [slot])
    book.add("holder", [replica(slot, step) for slot, step in sorted(copied)], [])

    def can(slot: int, step: int) -> bool:
        state = states.get(slot)
        clean = state is not None and state.step == step and not state.dirty and not state.torn
        return clean or (slot, step) in owned or (slot, step) in copied

    good = [step for step in steps if all(can(slot, step) for slot in slots)]
    choice = choose(slots, book)
    assert (choice.step if choice is not None else None) == max(good, default=None)
