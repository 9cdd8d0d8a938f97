"""What the transcripts don't show: refusals, deadlines, and that what is impossible leaves no trace."""

from __future__ import annotations

import math

import pytest
from coordinator_kit import ENDPOINT, dump, register

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Event, FromNode, NodeGone, Record, StopAsked, Tick
from hotswap.core.past import Past
from hotswap.core.transitions import TRANSITIONS, Kind, Phase


def fresh() -> Coordinator:
    return Coordinator(Limits(nodes_active=1, nodes_max=2, width=2), 0.0)


def training() -> Coordinator:
    machine = fresh()
    for event in (
        register("a#1"),
        register("b#1"),
        *(FromNode(node=node, message=m.NodeFenced(generation=1, held=(), workers=())) for node in ("a#1", "b#1")),
        *(FromNode(node="a#1", message=m.WorkerConnected(slot=slot, generation=1)) for slot in (0, 1)),
        *(FromNode(node="a#1", message=m.WorkerReady(slot=slot, generation=1)) for slot in (0, 1)),
        FromNode(node="a#1", message=m.Heartbeat(generation=1, acked={0: 1, 1: 1})),
    ):
        machine.handle(event, 1.0)
    assert machine.phase is Phase.TRAINING
    return machine


def refusal(machine: Coordinator, event: Event) -> str:
    """The reason; asserts that nothing has changed."""
    before = dump(machine)
    [effect] = machine.handle(event, 2.0)
    assert isinstance(effect, Record) and effect.event == "event_refused", effect
    assert dump(machine) == before
    return str(effect.fields["reason"])


def test_a_node_speaks_for_itself_only() -> None:
    message = m.Register(node="b#1", fault_domain="", endpoint=ENDPOINT)
    assert "calls itself b#1" in refusal(fresh(), FromNode(node="a#1", message=message))


def test_a_node_of_another_job_is_refused() -> None:
    assert "2 active nodes" in refusal(fresh(), register("a#1", generation=1, places=("a#1", "b#1")))


@pytest.mark.parametrize(
    "message",
    [
        m.WorkerConnected(slot=0, generation=1),
        m.WorkerReady(slot=0, generation=1),
        m.RestoreFailed(slot=0, generation=1, detail=""),
        m.Heartbeat(generation=2),
        m.WorkerTrouble(slot=2, generation=1, detail=""),
        m.WorkerFinished(slot=7, generation=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_cannot_happen_in_training_leaves_no_trace(message: m.FromAgent) -> None:
    assert refusal(training(), FromNode(node="a#1", message=message))


def test_a_heartbeat_may_leave_slots_out() -> None:
    machine = training()
    effects = machine.handle(FromNode(node="a#1", message=m.Heartbeat(generation=1, acked={0: 5})), 2.0)
    assert effects == []
    [effect] = machine.handle(FromNode(node="a#1", message=m.Heartbeat(generation=1, acked={1: 4, 9: 9})), 2.0)
    assert effect == Record(event="step_committed", fields={"generation": 1, "step": 4})


def test_an_old_acknowledgement_takes_nothing_back() -> None:
    machine = training()
    machine.handle(FromNode(node="a#1", message=m.Heartbeat(generation=1, acked={0: 5, 1: 5})), 2.0)
    assert machine.handle(FromNode(node="a#1", message=m.Heartbeat(generation=1, acked={0: 2, 1: 2})), 2.0) == []
    assert machine.job.committed == 5


def test_answers_meant_for_an_earlier_coordinator_are_passed_over() -> None:
    machine = Coordinator(Limits(nodes_active=2, nodes_max=2, width=1), 0.0)
    machine.handle(register("a#1", generation=3, places=("a#1", "b#1")), 0.1)
    assert machine.phase is Phase.RECOLLECTING
    before = dump(machine.job.roster)
    answer = FromNode(node="a#1", message=m.NodeFenced(generation=3, held=(), workers=()))
    assert machine.handle(answer, 0.2) == []
    assert dump(machine.job.roster) == before


def test_a_stopped_job_waits_for_nothing_and_answers_nothing() -> None:
    machine = training()
    machine.handle(StopAsked(exit_code=143, reason="SIGTERM"), 2.0)
    assert machine.deadline() == math.inf
    before = dump(machine)
    for event in (Tick(), register("c#1"), NodeGone(node="a#1", reason=""), StopAsked(exit_code=1, reason="")):
        assert machine.handle(event, 3.0) == []
    assert dump(machine) == before


def test_every_number_below_the_floor_is_used_up() -> None:
    machine = Coordinator(Limits(nodes_active=1, nodes_max=1, width=1), 0.0, Past(generation=8))
    machine.handle(register("a#1"), 0.1)
    assert machine.membership is None, "nodes of the job that has been may still come"
    machine.handle(Tick(), machine.deadline())
    assert machine.membership is not None and machine.membership.generation == 9


@pytest.mark.parametrize(
    "sizes", [{"nodes_active": 0, "nodes_max": 1}, {"nodes_active": 3, "nodes_max": 2}, {"width": 0}], ids=str
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        Limits(**{"nodes_active": 1, "nodes_max": 1, "width": 1, **sizes})


def test_the_table_is_closed() -> None:
    """Every phase can be left by a stop, nothing leaves STOPPED, and every phase but the first is reached from another."""
    assert {phase for phase, _ in TRANSITIONS} == set(Phase) - {Phase.STOPPED}
    assert {kind for _, kind in TRANSITIONS} == set(Kind)
    for phase in set(Phase) - {Phase.STOPPED}:
        assert TRANSITIONS[phase, Kind.STOP_ASKED] == {phase, Phase.STOPPED}
    reached = {to for (phase, _), allowed in TRANSITIONS.items() for to in allowed if to is not phase}
    assert reached == set(Phase) - {Phase.FORMING}
