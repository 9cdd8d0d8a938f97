"""How far apart snapshots are follows from what was measured, and from nothing else."""

from __future__ import annotations

import pytest

from hotswap.session.pace import INTERVAL_MAX, PATIENCE, SAMPLES, SAMPLES_MIN, Pace


def measured(pace: Pace, *, step: float, lead: float, latency: float, times: int = SAMPLES) -> Pace:
    for _ in range(times):
        pace.note_step(step, lead)
        pace.note_latency(latency)
    return pace


@pytest.mark.parametrize(
    ("latency", "limit", "expected"),
    [
        (0.7, 0.1, 1),  # there before the gate
        (0.85, 0.1, 1),  # late by less than the limit
        (1.0, 0.1, 2),  # late by 0.2 of a step
        (2.7, 0.1, 3),
        (2.9, 0.1, 3),  # late by 0.1 step in three steps
        (3.2, 0.1, 4),
        (3.2, 0.6, 3),
        (1e6, 0.1, INTERVAL_MAX),
    ],
)
def test_the_smallest_interval_whose_waiting_is_within_the_limit(latency: float, limit: float, expected: int) -> None:
    pace = measured(Pace(minimum=1, limit=limit), step=1.0, lead=0.8, latency=latency)
    assert pace.proposal() == expected
    if 1 < expected < INTERVAL_MAX:
        waiting = [max(0.0, latency - 0.8 - (k - 1)) / k for k in (expected - 1, expected)]
        assert waiting[0] > limit >= waiting[1]


@pytest.mark.parametrize(
    ("limit", "copy", "stall", "expected"),
    [
        (0.1, 0.5, 0.0, 1),
        (0.1, 0.1, 0.1, 1),
        (0.1, 0.25, 0.25, 3),
        (0.1, 100.0, 100.0, INTERVAL_MAX),
        (0.001, 0.39, 0.0, 10),  # steps beside the copy take a hundredth longer
        (0.001, 0.394, 0.004, 14),  # both together
    ],
)
def test_what_copies_cost_the_device_is_within_the_limit(
    limit: float, copy: float, stall: float, expected: int
) -> None:
    pace = measured(Pace(minimum=1, limit=limit), step=1.0, lead=0.8, latency=0.1)
    for _ in range(SAMPLES):
        pace.note_copy(copy, stall)
    assert pace.proposal() == expected


def test_without_a_limit_or_measurements_nothing_changes() -> None:
    assert measured(Pace(minimum=2, limit=0.0), step=1.0, lead=0.8, latency=9.0).proposal() == 2
    assert measured(Pace(minimum=1, limit=0.1), step=1.0, lead=0.8, latency=9.0, times=SAMPLES_MIN - 1).proposal() == 1


def test_one_late_replica_changes_nothing() -> None:
    pace = measured(Pace(minimum=1, limit=0.1), step=1.0, lead=0.8, latency=0.1)
    pace.note_latency(50.0)
    assert pace.proposal() == 1


def test_it_shrinks_only_after_patience_and_not_below_the_minimum() -> None:
    pace = measured(Pace(minimum=2, limit=0.1), step=1.0, lead=0.8, latency=5.0)
    assert pace.agree(pace.proposal())
    assert pace.interval == 5
    measured(pace, step=1.0, lead=0.8, latency=0.1)
    assert [pace.proposal() for _ in range(PATIENCE)] == [5] * (PATIENCE - 1) + [2]
    assert pace.agree(2) and not pace.agree(2)


def test_a_peer_decides_for_all_and_a_new_generation_begins_with_the_minimum() -> None:
    pace = Pace(minimum=1, limit=0.1)
    assert pace.agree(7)
    assert pace.proposal() == 7
    pace.restart()
    assert pace.interval == 1
