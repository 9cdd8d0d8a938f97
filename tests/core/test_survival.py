"""Which losses at the same time leave everything somewhere, against counting copies by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.placement import holders
from hotswap.core.survival import by_domain, fatal_losses, survives, tolerance
from hotswap.core.types import Membership


def job(count: int, width: int = 2) -> Membership:
    return Membership(generation=1, places=tuple(f"n{number}" for number in range(count)), width=width)


def test_with_one_replica_two_neighbours_are_too_many() -> None:
    it = job(4)
    kept = holders(it, {})
    assert not list(fatal_losses(it, kept, 1))
    assert list(fatal_losses(it, kept, 2)) == [("n0", "n1"), ("n0", "n3"), ("n1", "n2"), ("n2", "n3")]
    assert tolerance(it, kept) == 1


def test_labels_make_a_whole_rack_survivable() -> None:
    it, domains = job(4), {"n0": "rack=a", "n1": "rack=a", "n2": "rack=b", "n3": "rack=b,pdu=1"}
    racks = by_domain(it, domains)
    assert racks == {"pdu=1": ("n3",), "rack=a": ("n0", "n1"), "rack=b": ("n2", "n3")}
    assert not survives(it, holders(it, {}), racks["rack=a"])
    assert all(survives(it, holders(it, domains), nodes) for nodes in racks.values())


def test_what_only_own_snapshots_have_needs_one_of_them() -> None:
    it = job(1)
    kept = {0: ("spare",), 1: ("spare",)}
    assert survives(it, kept, ["n0"]) and not survives(it, kept, ["n0"], shared=True)
    assert (tolerance(it, kept), tolerance(it, kept, shared=True)) == (1, 0)
    assert tolerance(it, {}) == 0


@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.sampled_from(["", "x", "y", "x,z"]), min_size=6, max_size=6))
def test_k_replicas_survive_any_k_losses(count: int, replicas: int, labels: list[str]) -> None:
    it = job(count)
    kept = holders(it, dict(zip(it.places, labels, strict=False)), (), replicas)
    assert tolerance(it, kept) == min(replicas, count - 1)
    for lost in combinations(it.places, min(replicas, count - 1)):
        assert survives(it, kept, lost, shared=True)


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_more_loss_may_be_too_many(replicas: int) -> None:
    it = job(5)
    assert list(fatal_losses(it, holders(it, {}, (), replicas), replicas + 1))
