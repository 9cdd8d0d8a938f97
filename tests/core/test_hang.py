"""Who keeps whom waiting, and for how long that may be."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap.core.hang import HangWatch
from hotswap.core.limits import Limits
from hotswap.core.progress import GroupProgress, Progress, explain


def at(step: int = 5, *, groups: dict[str, tuple[tuple[int, ...], int]] | None = None, **fields: Any) -> Progress:
    made = {key: GroupProgress(members=members, issued=issued) for key, (members, issued) in (groups or {}).items()}
    return Progress(**{"step": step, "phase": "script", "issued": 0, "gate": step, "groups": made, **fields})


def watch(**fields: Any) -> HangWatch:
    made = HangWatch(Limits(nodes_active=1, nodes_max=1, width=4, **fields))
    made.begin(100.0)
    return made


# --- who ---------------------------------------------------------------------------------------------------------------


def test_the_chain_of_those_who_wait_ends_at_the_culprit() -> None:
    tp0, tp1, dp = (0, 1), (2, 3), (1, 3)
    reports = {
        # 3 hangs; 2 waits for it in their group, 1 in another, and 0 waits for 1.
        0: at(groups={"tp0": (tp0, 9)}, waits=True),
        1: at(groups={"tp0": (tp0, 8), "dp": (dp, 5)}, waits=True),
        2: at(groups={"tp1": (tp1, 7)}, waits=True),
        3: at(groups={"tp1": (tp1, 6), "dp": (dp, 4)}),
    }
    found = explain(reports, range(4))
    assert (found.culprits, found.waiting) == ((3,), (0, 1, 2))
    assert found.why == "slot 3 has not entered operation 5 of dp, in which slot 1 waits"


def test_in_one_group_the_last_one_is_waited_for_by_all() -> None:
    members = (0, 1, 2, 3)
    counts = dict(zip(members, (7, 7, 6, 5), strict=True))
    # Waiting inside of C++ looks like computing.
    found = explain({slot: at(groups={"dp": (members, count)}) for slot, count in counts.items()}, members)
    assert (found.culprits, found.waiting) == ((3,), (0, 1, 2))


def test_a_skipped_operation_is_blamed_on_the_one_that_most_wait_for() -> None:
    world, tp = (0, 1, 2, 3), (0, 1)
    reports = {slot: at(groups={"world": (world, 3)}, waits=True) for slot in (2, 3)}
    reports[0] = at(groups={"world": (world, 3), "tp": (tp, 8)}, waits=True)
    reports[1] = at(groups={"world": (world, 2), "tp": (tp, 9)}, waits=True)
    assert explain(reports, world).culprits == (1,)


def test_two_that_wait_for_each_other_are_both_or_neither_to_blame() -> None:
    first = at(groups={"a": ((0, 1), 3), "b": ((0, 1), 4)}, waits=True)
    second = at(groups={"a": ((0, 1), 4), "b": ((0, 1), 3)}, waits=True)
    found = explain({0: first, 1: second}, range(2))
    assert (found.culprits, found.waiting, found.why) == ((), (0, 1), "slots 0, 1 wait for each other")


def test_what_only_the_gate_shows_counts_where_nothing_else_does() -> None:
    reports = {0: at(gate=6, waits=True), 1: at(gate=5, waits=True), 2: at(gate=5)}
    found = explain(reports, range(3))
    assert found.culprits == (2,)
    assert found.why == "slot 2 has not entered operation 6 of the commit gate, in which slot 0 waits"


def test_who_sends_and_receives_is_not_counted_but_seen_inside() -> None:
    found = explain({0: at(waits=True), 1: at(), 2: at(waits=True)}, range(3))
    assert (found.culprits, found.waiting) == ((1,), (0, 2))
    assert found.why == "slot 1 is outside of communication, in which slots 0, 2 wait"


def test_several_may_be_to_blame_and_many_are_not_all_named() -> None:
    reports = {slot: at(groups={"dp": (tuple(range(20)), 8 if slot < 12 else 7)}) for slot in range(20)}
    found = explain(reports, range(20))
    assert found.culprits == tuple(range(12, 20))
    assert found.why == (
        "slots 12, 13, 14, 15, 16, 17, 18, 19 have not entered operation 8 of dp, "
        "in which slots 0, 1, 2, 3, 4, 5, 6, 7 and 4 more wait"
    )
    two = explain({0: at(waits=True), 1: at(), 2: at()}, range(3))
    assert two.why == "slots 1, 2 are outside of communication, in which slot 0 wait"


def test_a_process_that_says_nothing_any_more_is_not_inside_of_anything() -> None:
    reports = {0: at(groups={"dp": ((0, 1), 8)}, waits=True), 1: at(waits=True, mute_s=60.0)}
    assert explain(reports, range(2)).culprits == (1,)
    assert explain({0: at(waits=True)}, range(2)).culprits == (1,), "nor one that never said anything"


def test_who_has_finished_is_waited_for_by_nobody() -> None:
    reports = {slot: at(groups={"dp": ((0, 1, 2), 8 - slot)}) for slot in range(3)}
    assert explain(reports, (0, 1)).culprits == (1,)
    assert explain({}, ()).waiting == ()


def test_all_busy_elsewhere() -> None:
    found = explain({slot: at(groups={"dp": ((0, 1), 8)}) for slot in range(2)}, range(2))
    assert (found.culprits, found.waiting) == ((), ())


# --- when --------------------------------------------------------------------------------------------------------------


def test_patience_follows_the_jobs_own_steps() -> None:
    it = watch(hang_s=None, hang_floor_s=60.0, hang_ceiling_s=480.0)
    assert it.patience_s == 300.0, "the first step of a generation compiles, connects, fills caches"
    it.committed(1, 110.0)
    assert it.patience_s == 60.0
    it.committed(3, 150.0)
    assert it.patience_s == 200.0, "ten steps of twenty seconds"
    it.committed(4, 1150.0)
    it.committed(5, 2150.0)
    assert it.patience_s == 480.0, "collectives time out soon after"
    it.begin(3000.0)
    assert it.patience_s == 480.0


def test_a_pause_that_came_to_an_end_is_no_hang_the_next_time() -> None:
    it = watch(hang_s=None, hang_floor_s=60.0, hang_ceiling_s=480.0)
    it.committed(1, 100.0)
    for second in (101, 102, 142):
        it.saw(0, at(issued=second), float(second))
    assert it.patience_s == 120.0
    assert it.deadline() == 142.0 + 120.0


def test_a_budget_that_was_asked_for_is_kept() -> None:
    it = watch(hang_s=10.0, hang_ceiling_s=480.0)
    assert it.patience_s == 50.0
    it.committed(1, 101.0)
    it.committed(2, 191.0)
    assert it.patience_s == 10.0
    assert it.look(range(1), 109.9) is None


def test_time_in_which_nobody_was_heard_is_nobodys_hang() -> None:
    it = watch(hang_s=10.0)
    it.committed(1, 100.0)
    it.excuse(30.0, 135.0)
    assert it.deadline() == 140.0
    it.excuse(30.0, 136.0)
    assert it.deadline() == 146.0


def test_nothing_is_looked_for_if_that_was_asked_for() -> None:
    it = watch(hang_s=0.0)
    assert it.deadline() == float("inf") and it.look(range(1), 1e9) is None


def test_news_without_progress_is_kept_and_changes_no_deadline() -> None:
    it = watch(hang_s=10.0)
    it.saw(0, at(), 101.0)
    it.saw(0, at(waits=True), 105.0)
    assert it.deadline() == 151.0
    report = it.at(0)
    assert report is not None and report.waits and it.at(1) is None


@pytest.mark.parametrize(("committed", "again"), [(5, 3), (6, 1)])
def test_a_hang_is_remembered_until_its_step_is_done(committed: int, again: int) -> None:
    it = watch(hang_s=10.0)
    assert [it.again(2, 5), it.again(3, 5), it.again(2, 5)] == [1, 1, 2]
    it.begin(200.0)
    it.committed(committed, 201.0)
    assert it.again(2, 5) == again
