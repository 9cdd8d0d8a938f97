from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.placement import holder_of, holders, outcasts
from hotswap.core.types import Membership

NODES = [f"n{number}#1" for number in range(6)]
jobs = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.permutations(NODES).map(lambda order: tuple(order[:count])),
        st.integers(1, 3),
        st.dictionaries(st.sampled_from(NODES), st.sampled_from(["", "rack1", "rack2"])),
    )
)


def domain(node: str, domains: dict[str, str]) -> str:
    return domains.get(node) or node


def test_the_next_node_holds() -> None:
    assert [holder_of(position, ["a", "b", "c"], {}) for position in range(3)] == ["b", "c", "a"]


def test_the_next_node_of_another_domain_holds() -> None:
    domains = {"a": "x", "b": "x", "c": "y", "d": "y"}
    assert [holder_of(position, ["a", "b", "c", "d"], domains) for position in range(4)] == ["c", "c", "a", "a"]


def test_one_domain_is_better_than_no_replica() -> None:
    assert holder_of(1, ["a", "b"], {"a": "x", "b": "x"}) == "a"


def test_a_job_of_one_node_uses_a_spare_if_there_is_one() -> None:
    assert holder_of(0, ["a"], {}, ["s1", "s2"]) == "s1"
    assert holder_of(0, ["a"], {}) is None
    assert holders(Membership(generation=1, places=("a",), width=2), {}) == {}


@given(jobs)
def test_a_replica_is_never_where_its_owner_is(job: tuple[tuple[str, ...], int, dict[str, str]]) -> None:
    places, width, domains = job
    membership = Membership(generation=1, places=places, width=width)
    chosen = holders(membership, domains, ["spare#1"])
    assert sorted(chosen) == list(membership.slots)
    for slot, holder in chosen.items():
        owner = membership.node_of(slot)
        assert holder != owner
        others = {domain(node, domains) for node in places} - {domain(owner, domains)}
        if others:
            assert domain(holder, domains) != domain(owner, domains)


def test_who_is_cut_off_from_most_has_to_go() -> None:
    members = ["a#1", "b#1"]
    everybody = {"a#1": ["b#1"], "b#1": ["a#1", "c#1"], "c#1": []}
    assert outcasts(everybody, members) == ["b#1"], "one direction is enough"
    assert outcasts({"a#1": ["b#1"], "b#1": ["a#1"]}, members) == ["b#1"], "of equals the later one"
    assert outcasts({"a#1": ["c#1"], "c#1": []}, members) == ["c#1"], "of equals the spare"
    assert outcasts({"a#1": ["gone#1"], "b#1": []}, members) == []
    assert outcasts({}, members) == []


@given(st.dictionaries(st.sampled_from(NODES), st.sets(st.sampled_from(NODES))))
def test_those_that_are_left_reach_each_other(unreachable: dict[str, set[str]]) -> None:
    left = set(unreachable) - set(outcasts(unreachable, NODES[:2]))
    assert not any(peer in unreachable[node] for node in left for peer in left - {node})
    assert bool(left) == bool(unreachable), "nobody has to go alone"
