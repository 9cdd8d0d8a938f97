"""The checkers themselves: each finds what it is for and lets pass what is right."""

from __future__ import annotations

import pytest

from hotswap.sim.chronicle import ROOT, Chronicle, Copy, State, Violation

PLACES = ("a", "b")

HOLDERS = {0: ("b",), 1: ("a",)}


def at(step: int, history: int, position: int | None = None) -> State:
    return State(step=step, history=history, position=step if position is None else position)


def chronicle(*, strict: bool = True) -> Chronicle:
    made = Chronicle(slots=2, strict=strict)
    made.membership(1, PLACES)
    made.plan(1, PLACES, 0, [], fresh=True)
    made.go(both(at(0, ROOT)), PLACES, HOLDERS)
    made.trained = True
    return made


def both(state: State) -> dict[int, State]:
    return {0: state, 1: state}


def advance(made: Chronicle, state: State) -> State:
    """One step of both slots, replicated and passed through the next gate."""
    history = made.update(both(state), {0: state.position, 1: state.position})
    following = at(state.step + 1, history)
    made.stored(0, "a", "b", following)
    made.stored(1, "b", "a", following)
    made.gate(following.step, following.history, 1)
    return following


def copies(state: State) -> list[Copy]:
    return [Copy(node="a", slot=0, own=True, state=state), Copy(node="a", slot=1, own=False, state=state)]


def test_a_job_without_faults_is_fine() -> None:
    made = chronicle()
    state = at(0, ROOT)
    for _ in range(3):
        state = advance(made, state)
        made.counted(state.step)
    made.finish(3)


def test_a_number_is_used_once() -> None:
    with pytest.raises(Violation, match="two memberships"):
        chronicle().membership(1, ("a", "c"))
    made = chronicle()
    made.membership(3, ("a", "c"))
    with pytest.raises(Violation, match="announced after"):
        made.membership(2, ("a", "c"))


def test_a_number_is_used_once_without_a_log_too() -> None:
    with pytest.raises(Violation, match="two memberships"):
        chronicle(strict=False).membership(1, ("a", "c"))
    with pytest.raises(Violation, match="come to life"):
        chronicle(strict=False).plan(1, ("a", "c"), 0, [], fresh=False)
    made = chronicle(strict=False)
    made.membership(3, ("a", "c"))
    made.membership(1, PLACES)
    with pytest.raises(Violation, match="announced after"):
        made.membership(2, ("a", "d"))
    made.begin_anew()
    made.membership(1, ("a", "c"))


def test_steps_and_histories_do_not_mix() -> None:
    made = chronicle()
    for other in (at(2, 1), at(1, 2)):
        with pytest.raises(Violation, match="mixed states"):
            made.meet("gate", 1, {0: at(1, 1), 1: other})
    with pytest.raises(Violation, match="mixed states"):
        made.meet("gate", 1, {0: at(1, 1)})


def test_a_replica_is_elsewhere() -> None:
    with pytest.raises(Violation, match="node of the slot itself"):
        chronicle().stored(0, "a", "a", at(1, 1))


def test_a_step_counts_only_when_all_replicas_are_complete() -> None:
    made = chronicle()
    history = made.update(both(at(0, ROOT)), {0: 0, 1: 0})
    made.stored(0, "a", "b", at(1, history))
    with pytest.raises(Violation, match="not every slot's replica"):
        made.counted(1)
    made.stored(1, "b", "a", at(1, history))
    made.counted(1)
    assert made.committed == (1, history)


def test_one_loss_takes_no_committed_step() -> None:
    made = chronicle()
    advance(made, at(0, ROOT))
    made.lost("b")
    with pytest.raises(Violation, match="only \\['b'\\] lost"):
        made.plan(2, ("a", "c"), 0, [], fresh=False)


def test_two_losses_may_if_no_copy_is_left() -> None:
    made = chronicle()
    state = advance(made, at(0, ROOT))
    made.lost("a")
    made.lost("b")
    with pytest.raises(Violation, match="every slot's copy is there"):
        made.resume(-1, PLACES, copies(state))
    made.resume(0, PLACES, copies(state)[:1])
    assert made.committed == (0, ROOT)


def test_own_snapshots_count_where_the_slot_lives() -> None:
    made = chronicle()
    state = advance(made, at(0, ROOT))
    made.lost("a")
    made.lost("b")
    made.resume(-1, ("c", "b"), copies(state))


def test_a_job_that_has_trained_does_not_begin_from_nothing() -> None:
    with pytest.raises(Violation, match="silently"):
        chronicle().plan(2, PLACES, 0, [], fresh=True)


def test_training_goes_on_from_what_was_committed() -> None:
    made = chronicle()
    state = advance(made, at(0, ROOT))
    made.plan(2, PLACES, 1, [], fresh=False)
    made.go(both(state), PLACES, HOLDERS)
    undone = made.update(both(at(0, ROOT)), {0: 0, 1: 0})
    with pytest.raises(Violation, match="not a continuation"):
        made.go(both(at(1, undone)), PLACES, HOLDERS)
    with pytest.raises(Violation, match="not part of the history"):
        made.gate(1, undone, 2)


def test_a_loader_that_was_not_taken_back_is_noticed() -> None:
    made = chronicle()
    with pytest.raises(Violation, match="loaders at"):
        made.go({0: at(0, ROOT, 0), 1: at(0, ROOT, 1)}, PLACES, HOLDERS)


def test_every_sample_is_used_once_in_the_surviving_history() -> None:
    made = chronicle()
    history = made.update(both(at(0, ROOT)), {0: 0, 1: 1})
    made.gate(1, history, 1)
    with pytest.raises(Violation, match="used the samples"):
        made.finish(1)


def test_no_step_is_left_out() -> None:
    made = chronicle()
    advance(made, at(0, ROOT))
    with pytest.raises(Violation, match="after step 1 of 2"):
        made.finish(2)
    jumped = made.update(both(at(5, made.committed[1])), {0: 5, 1: 5})
    made.gate(6, jumped, 1)
    with pytest.raises(Violation, match="follows on"):
        made.finish(6)


def alone() -> Chronicle:
    made = Chronicle(slots=2, width=2, strict=True)
    made.membership(1, ("a",))
    made.plan(1, ("a",), 0, [], fresh=True)
    made.go(both(at(0, ROOT)), ("a",), {})
    return made


def test_a_node_that_is_alone_may_train_on_for_nobody_once_it_is_replaced() -> None:
    made = alone()
    mine = made.update(both(at(0, ROOT)), {0: 0, 1: 0})
    made.stored_alone(0, at(1, mine), 1)
    made.stored_alone(1, at(1, mine), 1)
    made.gate(1, mine, 1)
    assert made.committed == (1, mine)
    made.lost("a")
    made.membership(2, ("b",))
    made.plan(2, ("b",), 0, [], fresh=False)
    made.go(both(at(0, ROOT)), ("b",), {0: ("c",), 1: ("c",)})
    for slot in (0, 1):
        made.stored_alone(slot, at(1, mine), 1)
    made.gate(1, mine, 1)
    assert made.committed == (0, ROOT)
    with pytest.raises(Violation, match="not every slot's replica"):
        made.counted(1)
    history = made.update(both(at(0, ROOT)), {0: 0, 1: 0})
    for slot in (0, 1):
        made.stored(slot, "b", "c", at(1, history))
    made.counted(1)
    assert made.committed == (1, history)


def test_with_a_holder_nobody_trains_on_beside_the_job() -> None:
    made = chronicle()
    undone = made.update(both(at(0, ROOT)), {0: 0, 1: 0})
    made.plan(2, PLACES, 0, [], fresh=False)
    made.go(both(at(0, ROOT)), PLACES, HOLDERS)
    advance(made, at(0, ROOT))
    with pytest.raises(Violation, match="not part of the history"):
        made.gate(1, undone, 1)


def differing(*lost: str) -> Chronicle:
    """All agreed at step 1, went on to step 2, and then a comparison failed."""
    made = chronicle()
    state = advance(made, at(0, ROOT))
    made.agree(1)
    advance(made, state)
    for node in lost:
        made.lost(node)
    return made


def test_what_all_agreed_on_outlives_a_loss() -> None:
    for lost in ((), ("a",), ("b",)):
        made = differing(*lost)
        made.plan(2, PLACES, 1, [], fresh=False, distrusted_after=1)
        with pytest.raises(Violation, match="all agreed at step 1 last, only"):
            differing(*lost).plan(2, PLACES, 0, [], fresh=False, distrusted_after=1)
        with pytest.raises(Violation, match="all agreed at step 1 last, only"):
            differing(*lost).distrust(-1)
    differing("a", "b").distrust(-1)


def test_moving_elsewhere_is_no_reason_to_lose_what_all_agreed_on() -> None:
    made = differing()
    made.plan(2, ("c", "b"), 2, copies(at(2, made.committed[1])), fresh=False)
    made.go(both(at(2, made.committed[1])), ("c", "b"), {0: ("b",), 1: ("c",)})
    assert "a" in made.needed
    with pytest.raises(Violation, match="only \\[\\] lost"):
        made.distrust(-1)
    made.lost("a")
    made.lost("b")
    made.distrust(-1)


def test_a_job_that_goes_back_behind_what_all_agreed_on_has_that_again_everywhere() -> None:
    made = differing("a", "b")
    made.plan(2, ("c", "d"), 0, [], fresh=False)
    made.go(both(at(0, ROOT)), ("c", "d"), {0: ("d",), 1: ("c",)})
    with pytest.raises(Violation, match="all agreed at step 0 last"):
        made.distrust(-1)
    made.lost("c")
    made.lost("d")
    made.distrust(-1)


def test_what_slots_share_is_not_taken_from_the_odd_one() -> None:
    for odd in (0, 1):
        made = differing("a")
        made.shared, made.odd = True, frozenset({odd})
        if odd:
            made.distrust(-1)
        else:
            with pytest.raises(Violation, match="all agreed"):
                made.distrust(-1)
