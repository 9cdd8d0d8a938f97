from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.keep import GroupState, groups_to_keep

KEY = "group"
STATES = [None] + [
    GroupState(members=members, issued=issued, intact=intact)
    for members in ((0, 1), (0, 1, 2))
    for issued in (4, 5)
    for intact in (True, False)
]


def test_every_combination_of_three_slots_reports() -> None:
    kept = 0
    for reported in itertools.product(STATES, repeat=3):
        for replaced in (frozenset[int](), frozenset({0}), frozenset({2})):
            reports = {slot: {KEY: state} if state else {} for slot, state in enumerate(reported)}
            result = groups_to_keep(reports, replaced)
            assert (KEY in result) == _agreed(reported, replaced), (reported, replaced)
            kept += len(result)
    assert kept == 6, "4 or 5 issued: the pair with nobody or slot 2 replaced, all three with nobody replaced"


def _agreed(reported: tuple[GroupState | None, ...], replaced: frozenset[int]) -> bool:
    """The rule in other words: those who report the group are exactly its members, and they all say the same good thing."""
    reporters = tuple(slot for slot, state in enumerate(reported) if state)
    distinct = {state for state in reported if state}
    return (
        len(distinct) == 1
        and all(state.intact and state.members == reporters for state in distinct)
        and not replaced & set(reporters)
    )


def test_groups_of_the_same_members_are_kept_together_or_not_at_all() -> None:
    good = GroupState(members=(0, 1), issued=7, intact=True)
    ahead = GroupState(members=(1, 0), issued=8, intact=True)
    behind = GroupState(members=(1, 0), issued=7, intact=True)
    other = GroupState(members=(2,), issued=1, intact=True)
    reports = {0: {"a": good, "b": ahead}, 1: {"a": good, "b": behind}, 2: {"c": other}}
    assert groups_to_keep(reports, frozenset()) == {"c"}
    reports[0]["b"] = behind
    assert groups_to_keep(reports, frozenset()) == {"a", "b", "c"}
    assert groups_to_keep(reports, frozenset({1})) == {"c"}


def test_a_slot_that_did_not_report_takes_its_groups_along() -> None:
    state = GroupState(members=(0, 1), issued=0, intact=True)
    assert groups_to_keep({0: {"a": state}}, frozenset()) == frozenset()
    assert groups_to_keep({}, frozenset()) == frozenset()


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[int, dict[str, GroupState]], frozenset[int], dict[str, list[str]]]:
    """Slots that ran prefixes of one program, each stopped somewhere; the truth is each member's list of operations."""
    world = draw(st.integers(1, 5))
    groups = draw(st.lists(st.sets(st.integers(0, world - 1), min_size=1), min_size=1, max_size=4))
    members = {f"g{i}": tuple(sorted(group)) for i, group in enumerate(groups)}
    program = draw(st.lists(st.sampled_from(sorted(members)), max_size=12))
    stopped = [draw(st.integers(0, len(program))) for _ in range(world)]
    replaced = frozenset(draw(st.sets(st.integers(0, world - 1))))
    reports = {
        slot: {
            key: GroupState(members=group, issued=program[: stopped[slot]].count(key), intact=draw(st.booleans()))
            for key, group in members.items()
            if slot in group
        }
        for slot in range(world)
        if slot not in replaced
    }
    history = {
        key: [f"{key}:{program[: stopped[slot]].count(key)}" for slot in group] for key, group in members.items()
    }
    return reports, replaced, history


@given(programs())
def test_a_kept_group_was_entered_equally_by_living_healthy_members(
    case: tuple[dict[int, dict[str, GroupState]], frozenset[int], dict[str, list[str]]],
) -> None:
    reports, replaced, history = case
    kept = groups_to_keep(reports, replaced)
    for key in kept:
        members = {slot for slot, report in reports.items() if key in report}
        assert len(set(history[key])) == 1, "one member would wait for an operation that another has never started"
        assert not members & replaced
        assert all(reports[slot][key].intact for slot in members)
        twins = [
            other
            for report in reports.values()
            for other, state in report.items()
            if set(state.members) == {m for slot in members for m in reports[slot][key].members}
        ]
        assert set(twins) <= kept


def test_a_group_without_members_is_not_kept() -> None:
    assert groups_to_keep({0: {"a": GroupState(members=(), issued=0, intact=True)}}, frozenset()) == frozenset()
