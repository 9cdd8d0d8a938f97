from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.types import Membership, node_id, node_order

FOUR = Membership(generation=3, places=("a", "b"), width=2)


def test_a_node_is_named_by_its_start() -> None:
    assert node_id("host7", 2) == "host7#2"


def test_nodes_sort_by_number() -> None:
    names = ["node10#1", "node9#2", "node9#10", "a", "node"]
    assert sorted(names, key=node_order) == ["a", "node", "node9#2", "node9#10", "node10#1"]


@given(st.lists(st.text(alphabet="ab09#", max_size=6), max_size=6))
def test_every_set_of_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names, key=node_order)) == sorted(names)


def test_slots_and_places_agree() -> None:
    assert list(FOUR.slots) == [0, 1, 2, 3]
    assert [FOUR.node_of(slot) for slot in FOUR.slots] == ["a", "a", "b", "b"]
    assert list(FOUR.slots_of("b")) == [2, 3]
    assert list(FOUR.slots_of("c")) == []


def test_replacing_keeps_the_others_in_place() -> None:
    following = FOUR.replace({0: "c"}, 7)
    assert following == Membership(generation=7, places=("c", "b"), width=2)


@pytest.mark.parametrize(
    ("generation", "places", "width"), [(0, ("a",), 1), (1, ("a",), 0), (1, ("a", "a"), 1)], ids=str
)
def test_a_wrong_membership_cannot_exist(generation: int, places: tuple[str, ...], width: int) -> None:
    with pytest.raises(AssertionError):
        Membership(generation=generation, places=places, width=width)


def test_generations_only_grow() -> None:
    with pytest.raises(AssertionError, match="generation 3 after 3"):
        FOUR.replace({}, 3)
    with pytest.raises(AssertionError, match="two places"):
        FOUR.replace({0: "b"}, 4)
