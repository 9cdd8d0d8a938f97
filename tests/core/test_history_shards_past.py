"""What outlives a generation: plans, checkpoints, and what a new coordinator reads in the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.history import History
from hotswap.core.past import Past, recall
from hotswap.core.shards import INCOMPLETE_MAX, Shards


def test_who_missed_no_plan_may_keep_everything() -> None:
    history = History()
    history.planned(1, 0)
    history.planned(4, 10)
    assert history.valid_to(4) is None
    assert history.valid_to(3) == 10
    assert history.valid_to(0) == 0


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 10))
def test_the_furthest_way_back_counts(steps: list[int], knows: int) -> None:
    history = History()
    for generation, step in enumerate(steps, start=1):
        history.planned(generation, step)
    assert history.valid_to(knows) == min(steps[knows:], default=None)


@given(st.lists(st.integers(0, 20), max_size=8), st.data())
def test_what_others_know_is_learnt_in_any_order(steps: list[int], data: st.DataObject) -> None:
    plans = list(enumerate(steps, start=1))
    parts = [data.draw(st.lists(st.sampled_from(plans))) if plans else [] for _ in range(3)]
    learnt = History(parts[0])
    learnt.learn(parts[1])
    learnt.learn(parts[2])
    together = History([plan for part in parts for plan in part])
    assert learnt.plans == together.plans
    assert all(learnt.valid_to(knows) == together.valid_to(knows) for knows in range(9))


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
