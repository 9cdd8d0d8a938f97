"""The network between real nodes is cut: whoever can still go on together does, and only they."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e_harness import DDP, Cell, Event, Outcome, Program
from hosts import DEADLINE_S, Hosts, assert_same, needs_hosts

from hotswap.chaos.network import network
from hotswap.demo.options import Layout, TrainOptions

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    needs_hosts,
    pytest.mark.timeout(180),
]
Reference = Callable[[Cell], Outcome]
HEAD, SPARE = "z", "c"
"""The coordinator's host, itself a spare, and the other spare; ``a`` and ``b`` train."""
HOSTS = (HEAD, "a", "b", SPARE)
TWO = Program(
    name="ddp-two",
    script=DDP.script,
    train=TrainOptions(layout=Layout(dp=2), steps=500, eval_every=50, tokens=64, width=64, layers=2, rows=4, warmup=2),
    nodes=2,
    width=1,
)
CELL = Cell(program=TWO, spares=2)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        made = Hosts(stack.enter_context(network(HOSTS)), tmp_path, CELL)
        stack.callback(made.close)
        for rank, host in enumerate(HOSTS):
            made.launch(host, "--rdzv-endpoint", f"{made.net.addresses[HEAD]}:29400", "--node-rank", str(rank))
        made.wait_for("spare_ready")
        made.wait_for("step_committed")
        yield made


def assert_replaced(nodes: Hosts, began: float, within_s: float) -> Event:
    """Another node trains in the place of b, that soon."""
    lost = nodes.wait_for("node_lost")
    assert lost["node"].startswith("b#"), nodes.story()
    done = nodes.wait_for("recovery_done")
    print(f"resumed {done['time'] - began:.2f} s after the cut: {lost['reason']}")
    assert done["time"] - began < within_s, nodes.story()
    return lost


@pytest.mark.full_matrix
def test_a_node_that_nobody_reaches_is_replaced_and_its_return_changes_nothing(
    nodes: Hosts, reference_of: Reference
) -> None:
    began = time.time()
    nodes.net.cut_both("b", ["a", SPARE, HEAD])
    lost = assert_replaced(nodes, began, 10.0)
    assert lost["reason"] == "silent for 2 s"
    nodes.net.heal()
    assert nodes.wait_for("node_joined")["role"] == "spare"
    assert_same(nodes.finish(HEAD), reference_of(CELL))
    assert nodes.launchers["b"].wait(DEADLINE_S) == 0


@pytest.mark.full_matrix
@pytest.mark.parametrize("direction", ["to the coordinator", "from the coordinator"])
def test_a_node_that_is_cut_off_from_the_coordinator_in_one_direction_is_replaced(
    direction: str, nodes: Hosts, reference_of: Reference
) -> None:
    began = time.time()
    nodes.net.cut(*(("b", HEAD) if direction == "to the coordinator" else (HEAD, "b")))
    assert_replaced(nodes, began, 15.0)
    assert_same(nodes.finish(HEAD), reference_of(CELL))


@pytest.mark.parametrize("ways", [pytest.param("both", marks=pytest.mark.full_matrix), "one"])
def test_a_node_that_its_peers_do_not_reach_is_replaced_although_the_coordinator_does(
    ways: str, nodes: Hosts, reference_of: Reference
) -> None:
    began = time.time()
    for peer in ("a", SPARE):
        nodes.net.cut("b", peer)
        if ways == "both":
            nodes.net.cut(peer, "b")
    lost = assert_replaced(nodes, began, 30.0)
    assert lost["reason"].startswith("cut off from a#")
    assert_same(nodes.finish(HEAD), reference_of(CELL))
    assert nodes.launchers["b"].wait(DEADLINE_S) == 75


@pytest.mark.full_matrix
def test_a_coordinator_that_is_cut_off_from_all_takes_back_who_has_trained_on(
    nodes: Hosts, reference_of: Reference
) -> None:
    nodes.net.cut_both(HEAD, ["a", "b", SPARE])
    for _ in range(3):
        nodes.wait_for("node_lost")
    nodes.wait_for("waiting_for_node")
    nodes.net.heal()
    nodes.wait_for("recovery_done")
    assert_same(nodes.finish(HEAD), reference_of(CELL))
