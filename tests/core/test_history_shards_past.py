"""What outlives a generation: plans, checkpoints, and what a new coordinator reads in the log."""

from __future__ import annotations

import pytest
from coordinator_kit import register
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.counsel import HOSTS_MAX, REASON_MAX
from hotswap.core.events import Advice, Judged, Record
from hotswap.core.history import History
from hotswap.core.past import Past, recall
from hotswap.core.shards import INCOMPLETE_MAX, Shards
from hotswap.core.transitions import Phase


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


def test_no_more_hosts_are_barred_than_can_have_a_fault_of_their_own() -> None:
    machine = Coordinator(Limits(nodes_active=1, nodes_max=1, width=1), 0.0)
    machine.handle(register("a#1"), 0.5)
    assert machine.phase is Phase.FENCING
    for number in range(HOSTS_MAX + 9):
        machine.handle(Judged(advice=Advice.EXCLUDE, host=f"n{number}", reason="broken"), 1.0)
    machine.handle(Judged(advice=Advice.EXCLUDE, host="n1", reason="said again"), 1.0)
    assert len(machine.job.counsel.excluded) == HOSTS_MAX
    assert machine.job.counsel.excluded["n1"] == "broken"


def test_a_coordinator_knows_that_there_are_nodes_that_it_has_not_heard_yet() -> None:
    limits = Limits(nodes_active=2, nodes_max=2, width=1)
    assert not Coordinator(limits, 0.0).job.hears_nodes, "the first one of a job waits for its nodes"
    machine = Coordinator(limits, 0.0, Past(generation=3))
    assert machine.job.hears_nodes
    machine.handle(register("a", generation=3, places=("a", "b")), 1.0)
    assert machine.job.hears_nodes
    machine.handle(register("b", generation=3, places=("a", "b")), 1.0)
    assert not machine.job.hears_nodes


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
            {"event": "advised", "generation": 4, "advice": "exclude", "host": "n1", "reason": "its GPU is gone"},
            {"event": "advised", "generation": 4, "advice": "avoid", "host": "n2", "reason": "suspected"},
            {"event": "advised", "generation": 4, "advice": "avoid", "host": "n1", "reason": "suspected"},
            {"event": "advised", "generation": 4, "advice": "avoid", "host": "n2", "reason": "suspected again"},
            {"event": "advised", "generation": 4, "advice": "exclude", "host": "n1", "reason": "it is broken"},
            {"event": "advised", "generation": 4, "advice": "check", "host": "n3", "reason": "maybe"},
        ]
    )
    assert past == Past(
        generation=4,
        started=True,
        plans=((1, 0), (3, 7)),
        excluded=(("n1", "its GPU is gone"),),
        avoided=(("n2", "suspected"), ("n1", "suspected")),
    )
    assert not recall([{"event": "recovery_started", "generation": 2}]).started


@pytest.mark.parametrize("advice", [Advice.EXCLUDE, Advice.AVOID])
def test_a_successor_knows_the_hosts_that_its_predecessor_knew(advice: Advice) -> None:
    machine = Coordinator(Limits(nodes_active=1, nodes_max=1, width=1), 0.0)
    machine.handle(register("a#1"), 0.0)
    log = []
    for number in range(HOSTS_MAX + 5):
        for reason in ("first " + 1000 * "x", "second"):
            for effect in machine.handle(Judged(advice=advice, host=f"n{number}", reason=reason), 1.0):
                assert isinstance(effect, Record)
                log.append({"event": effect.event, **effect.fields})
    successor = Coordinator(machine.limits, 2.0, recall(log))
    before, after = machine.job.counsel, successor.job.counsel
    assert (after.excluded, after.avoided) == (before.excluded, before.avoided)
    known = [*after.excluded.values(), *after.avoided.values()]
    assert len(known) == HOSTS_MAX
    assert {reason[:6] for reason in known} == {"first "} and max(map(len, known)) == REASON_MAX
