"""What outlives a generation: plans, checkpoints, and what a new coordinator reads in the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.history import NOTHING, History
from hotswap.core.past import Past, recall
from hotswap.core.shards import INCOMPLETE_MAX, Shards


def test_who_missed_no_plan_may_keep_everything() -> None:
    history = History()
    history.planned(1, 0)
    history.planned(4, 10)
    assert history.valid_to(4) is None
    assert history.valid_to(3) == 10
    assert history.valid_to(0) == 0


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(-1, 10))
def test_the_furthest_way_back_counts(steps: list[int], knows: int) -> None:
    history = History()
    for generation, step in enumerate(steps, start=1):
        history.planned(generation, step)
    missed = steps[max(0, knows) :]
    assert history.valid_to(knows) == (min(missed, default=None) if knows >= 0 else NOTHING)


def test_after_a_restart_nothing_is_known_of_earlier_plans() -> None:
    history = History(since=5)
    history.planned(6, 40)
    assert history.valid_to(4) == NOTHING
    assert history.valid_to(5) == 40
    assert history.valid_to(6) is None


def test_a_checkpoint_is_complete_once() -> None:
    shards = Shards()
    assert not shards.add(10, 0, 1, range(2))
    assert not shards.add(10, 0, 1, range(2))
    assert shards.add(10, 1, 2, range(2)) == {0: 1, 1: 2}
    assert not shards.add(10, 1, 2, range(2))


def test_a_later_checkpoint_makes_earlier_ones_pointless() -> None:
    shards = Shards()
    shards.add(10, 0, 1, range(2))
    shards.add(20, 0, 1, range(2))
    assert shards.add(20, 1, 1, range(2))
    assert not shards.add(10, 1, 1, range(2))


def test_shards_of_undone_steps_do_not_count() -> None:
    shards = Shards()
    shards.add(10, 0, 1, range(2))
    shards.add(20, 0, 1, range(2))
    shards.undo_after(10)
    assert not shards.add(20, 1, 1, range(2))
    assert shards.add(10, 1, 1, range(2))


def test_incomplete_checkpoints_are_not_kept_for_ever() -> None:
    shards = Shards()
    for step in range(INCOMPLETE_MAX + 1):
        shards.add(step, 0, 1, range(2))
    assert not shards.add(0, 1, 1, range(2))
    assert shards.add(1, 1, 1, range(2))


def test_an_empty_log_tells_nothing() -> None:
    assert recall([]) == Past()


def test_a_log_tells_numbers_plans_and_whether_the_job_trained() -> None:
    past = recall(
        [
            {"event": "coordinator_started", "restarted": False},
            {"event": "recovery_planned", "generation": 1, "resume_step": 0},
            {"event": "training_started", "generation": 1, "step": 0},
            {"event": "recovery_planned", "generation": 3, "resume_step": 7},
            {"event": "recovery_done", "generation": 3, "resume_step": 7},
            {"event": "recovery_started", "generation": 4},
        ]
    )
    assert past == Past(generation=4, started=True, plans=((1, 0), (3, 7)))
    assert not recall([{"event": "recovery_started", "generation": 2}]).started
