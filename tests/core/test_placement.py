from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.placement import holders, holders_of, labels, outcasts
from hotswap.core.types import Membership

NODES = [f"n{number}#1" for number in range(6)]
jobs = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.permutations(NODES).map(lambda order: tuple(order[:count])),
        st.integers(1, 3),
        st.dictionaries(st.sampled_from(NODES), st.sampled_from(["", "rack1", "rack2"])),
    )
)


def shared(node: str, other: str, domains: dict[str, str]) -> int:
    return len(labels(domains.get(node, "")) & labels(domains.get(other, "")))


def first(position: int, places: list[str], domains: dict[str, str]) -> str:
    (found,) = holders_of(position, places, domains)
    return found


def test_the_next_node_holds() -> None:
    assert [first(position, ["a", "b", "c"], {}) for position in range(3)] == ["b", "c", "a"]


def test_the_next_node_of_another_domain_holds() -> None:
    domains = {"a": "x", "b": "x", "c": "y", "d": "y"}
    assert [first(position, ["a", "b", "c", "d"], domains) for position in range(4)] == ["c", "c", "a", "a"]


def test_one_domain_is_better_than_no_replica() -> None:
    assert first(1, ["a", "b"], {"a": "x", "b": "x"}) == "a"


def test_of_several_domains_as_few_as_possible_are_shared() -> None:
    domains = {
        "a": "switch=top, rack=1,pdu=1",
        "b": "switch=top,rack=1,pdu=2",
        "c": "switch=top,rack=2,pdu=1",
        "d": "switch=top,rack=2,pdu=2",
    }
    assert first(0, ["a", "b", "c", "d"], domains) == "d", "what all have in common says nothing"
    assert first(0, ["a", "b", "c"], domains) == "b", "of equals the next one"


def test_holders_avoid_each_other_as_well() -> None:
    domains = {"a": "x", "b": "y", "c": "y", "d": "z", "e": "x"}
    places = ["a", "b", "c", "d", "e"]
    assert holders_of(0, places, domains, replicas=2) == ("b", "d")
    assert holders_of(0, places, domains, replicas=3) == ("b", "d", "c"), "then another domain than the owner's"
    assert holders_of(0, places, domains, replicas=9) == ("b", "d", "c", "e"), "as many as there are"


def test_a_job_of_one_node_uses_spares_if_there_are_any() -> None:
    assert holders_of(0, ["a"], {}, ["s1", "s2"]) == ("s1",)
    assert holders_of(0, ["a"], {}, ["s1", "s2"], 2) == ("s1", "s2")
    assert holders_of(0, ["a"], {}) == ()
    assert holders(Membership(generation=1, places=("a",), width=2), {}) == {}


@given(jobs, st.integers(1, 3))
def test_a_replica_is_never_where_its_owner_or_another_one_is(
    job: tuple[tuple[str, ...], int, dict[str, str]], replicas: int
) -> None:
    places, width, domains = job
    membership = Membership(generation=1, places=places, width=width)
    chosen = holders(membership, domains, ["spare#1"], replicas)
    assert sorted(chosen) == list(membership.slots)
    for slot, nodes in chosen.items():
        owner = membership.node_of(slot)
        assert owner not in nodes
        assert len(set(nodes)) == len(nodes) == min(replicas, max(1, len(places) - 1))
        others = set(places) - {owner}
        foreign = [node for node in others if not shared(node, owner, domains)]
        assert sum(not shared(node, owner, domains) for node in nodes if node in others) == min(
            len(foreign), len([node for node in nodes if node in others])
        )


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
