"""Jobs whose script does not use hotswap: they run, but nothing of them can be recovered."""

from __future__ import annotations

import pytest

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Effect, Exit, FromNode, NodeGone, Send, Tick
from hotswap.core.transitions import Phase
from hotswap.core.types import Endpoint

NODES = ("a#1", "b#1", "c#1")
HOURS = 3600.0


class Plain:
    """Two active nodes of one slot each and a spare, none of whose workers has called hotswap.init()."""

    def __init__(self) -> None:
        self.machine = Coordinator(Limits(nodes_active=2, nodes_max=3, width=1, build_s=10), 0.0)
        self.effects: list[Effect] = []
        for node in NODES:
            endpoint = Endpoint(host="127.0.0.1", port=1)
            self.say(node, m.Register(node=node, fault_domain="", endpoint=endpoint, protected=False))
        for node in NODES:
            self.say(node, m.NodeFenced(generation=1, held=(), workers=()))
        assert self.machine.phase is Phase.REBUILDING

    def say(self, node: str, message: m.FromAgent, now: float = 1.0) -> list[Effect]:
        self.effects = self.machine.handle(FromNode(node=node, message=message), now)
        return self.effects

    def exit_code(self) -> int | None:
        return next((effect.exit_code for effect in self.effects if isinstance(effect, Exit)), None)


def test_it_may_run_for_as_long_as_it_wants_and_ends_well() -> None:
    job = Plain()
    for hour in range(1, 50):
        for node in NODES:
            job.say(node, m.Heartbeat(generation=1, protected=False), hour * HOURS)
        assert job.machine.handle(Tick(), hour * HOURS) == []
    for slot, node in enumerate(NODES[:2]):
        job.say(node, m.WorkerFinished(slot=slot, generation=1), 50 * HOURS)
    assert job.exit_code() == 0


@pytest.mark.parametrize(("status", "code"), [(-9, 137), (-15, 143), (3, 1)])
def test_a_lost_worker_ends_it(status: int, code: int) -> None:
    job = Plain()
    job.say("b#1", m.WorkerLost(slot=1, generation=1, status=status))
    assert job.exit_code() == code


def test_a_lost_node_ends_it_and_a_lost_spare_does_not() -> None:
    job = Plain()
    job.effects = job.machine.handle(NodeGone(node="c#1", reason="gone"), 1.0)
    assert job.exit_code() is None
    job.effects = job.machine.handle(NodeGone(node="a#1", reason="gone"), 1.0)
    assert job.exit_code() == 75


def test_spares_run_the_script_only_once_it_is_known_to_be_protected() -> None:
    """It would train a second time, and write over what the first one writes."""
    job = Plain()
    fences = [e.message for e in job.effects if isinstance(e, Send) and isinstance(e.message, m.Fence)]
    assert all(fence.positions == () for fence in fences)
    effects = job.say("a#1", m.Heartbeat(generation=1, protected=True))
    [told] = [effect for effect in effects if isinstance(effect, Send)]
    assert told.node == "c#1" and isinstance(told.message, m.Fence)
    assert told.message.generation == 1 and told.message.positions == (0, 1)
    assert job.say("b#1", m.Heartbeat(generation=1, protected=True)) == []
    job.say("b#1", m.WorkerLost(slot=1, generation=1, status=-9))
    assert job.exit_code() is None and job.machine.phase is Phase.FENCING
