"""Whom an ordered fault strikes, and what is said where it can strike nobody."""

from __future__ import annotations

import signal

import pytest
from coordinator_kit import dump, register

from hotswap.core import messages as m
from hotswap.core.commands import Inject
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.drills import DRILLS, Aim, Victim, aim
from hotswap.core.events import FromNode, NodeGone, StopAsked
from hotswap.node.process import DRAIN_SIGNAL


def forming() -> Coordinator:
    return Coordinator(Limits(nodes_active=2, nodes_max=3, width=2), 0.0)


def training() -> Coordinator:
    """Slots 0 and 1 on a, 2 and 3 on b; c is a spare."""
    machine = forming()
    members = ("a#1", "b#1")
    for node in (*members, "c#1"):
        machine.handle(register(node), 1.0)
    for node in (*members, "c#1"):
        machine.handle(FromNode(node=node, message=m.NodeFenced(generation=1, held=(), workers=())), 1.0)
    for kind in (m.WorkerConnected, m.WorkerReady):
        for slot in range(4):
            machine.handle(FromNode(node=members[slot // 2], message=kind(slot=slot, generation=1)), 1.0)
    return machine


def order(fault: str, slot: int = -1, node: str = "") -> Inject:
    return Inject(fault=fault, slot=slot, node=node, reason="a test", within_s=1.0)


def aimed(machine: Coordinator, fault: str, **victim: object) -> Aim:
    before = dump(machine)
    found = aim(machine.job, order(fault, **victim))  # type: ignore[arg-type]
    assert dump(machine) == before, "aiming changes nothing"
    assert bool(found.refusal) is (not found.node and fault != "coordinator"), found
    return found


@pytest.mark.parametrize(
    ("fault", "victim", "node", "slot"),
    [
        ("worker", {"slot": 3}, "b#1", 3),
        ("stop-worker", {"slot": 0}, "a#1", 0),
        ("node", {"node": "b"}, "b#1", -1),
        ("stop-node", {"node": "b#1"}, "b#1", -1),
        ("node", {"node": "c"}, "c#1", -1),
        ("spare", {"node": "c"}, "c#1", -1),
        ("drain", {"node": "a"}, "a#1", -1),
        ("coordinator", {}, "", -1),
    ],
)
def test_whom_it_strikes(fault: str, victim: dict[str, object], node: str, slot: int) -> None:
    assert aimed(training(), fault, **victim) == Aim(node=node, slot=slot)


@pytest.mark.parametrize(
    ("fault", "victim", "said"),
    [
        ("meteor", {}, "no fault 'meteor' here; there are worker, segv-worker"),
        ("worker", {}, "say which one: --slot 0 to 3"),
        ("worker", {"slot": 4}, "there is no slot 4: --slot 0 to 3"),
        ("node", {}, "say which node: --node, one of a#1, b#1, c#1"),
        ("agent", {"node": "d"}, "there is no node 'd': --node, one of a#1, b#1, c#1"),
        ("spare", {"node": "a"}, "a#1 trains and is no spare; to strike it all the same: hotswap inject ... node"),
    ],
)
def test_what_is_said_where_there_is_no_such_victim(fault: str, victim: dict[str, object], said: str) -> None:
    assert said in aimed(training(), fault, **victim).refusal


def test_before_there_are_members_no_slot_has_a_place() -> None:
    machine = forming()
    assert "while the job is forming; try again" in aimed(machine, "worker", slot=0).refusal
    assert "one of none" in aimed(machine, "node", node="a").refusal
    machine.handle(register("a#1"), 1.0)
    assert aimed(machine, "node", node="a").node == "a#1"


def test_the_node_of_a_slot_may_be_gone() -> None:
    machine = training()
    for node in ("c#1", "b#1"):
        machine.handle(NodeGone(node=node, reason="closed"), 2.0)
    assert "slot 2 was on b#1, which is gone; try again" in aimed(machine, "worker", slot=2).refusal
    assert "there is no node 'b'" in aimed(machine, "node", node="b").refusal


def test_a_node_on_its_way_out_may_still_be_struck_but_not_told_again_to_leave() -> None:
    machine = training()
    machine.handle(FromNode(node="b#1", message=m.NodeDraining(leaves_in_s=60.0, reason="told to")), 2.0)
    assert aimed(machine, "drain", node="b").refusal == "b#1 is on its way out already"
    assert aimed(machine, "node", node="b").node == "b#1", "a loss while a node is drained is worth a drill"


def test_two_starts_of_one_host_are_told_apart() -> None:
    machine = training()
    machine.handle(register("b#2"), 2.0)
    assert "b has several: say which one, --node b#1 or b#2" in aimed(machine, "node", node="b").refusal
    assert aimed(machine, "node", node="b#2").node == "b#2"


def test_a_job_that_has_ended_has_no_drills() -> None:
    machine = training()
    machine.handle(StopAsked(exit_code=1, reason=""), 2.0)
    assert aim(machine.job, order("coordinator")).refusal == "the job has ended"


def test_what_a_drill_does_to_an_agent() -> None:
    assert DRILLS["drain"].number is DRAIN_SIGNAL and not DRILLS["drain"].fatal
    struck = [name for name, drill in DRILLS.items() if drill.victim in (Victim.NODE, Victim.AGENT) and drill.fatal]
    assert struck == ["node", "spare", "stop-node", "agent"]
    assert DRILLS["stop-node"].number is signal.SIGSTOP
