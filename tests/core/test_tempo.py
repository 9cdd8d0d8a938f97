"""Who is slow, told from parts of a step in which nobody waits, and what becomes of its node."""

from __future__ import annotations

from coordinator_kit import ENDPOINT

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator
from hotswap.core.events import Disconnect, Effect, FromNode, Record, Send
from hotswap.core.limits import Limits
from hotswap.core.progress import Progress
from hotswap.core.tempo import STEADY_STEPS, compare
from hotswap.core.transitions import Phase

ROLES = dict.fromkeys(range(4), "all the same")


def parts(*script: float, update: float = 0.1) -> dict[int, dict[str, float]]:
    return {slot: {"script": seconds, "update": update} for slot, seconds in enumerate(script)}


def test_the_one_that_takes_longer_than_the_others_is_slow() -> None:
    found = compare(parts(0.1, 0.2, 0.1, 0.12), ROLES, 1.5)
    assert list(found) == [1]
    assert (found[1].part, found[1].own_s, found[1].peers_s, found[1].ratio) == ("script", 0.2, 0.1, 2.0)


def test_what_slows_all_down_names_nobody() -> None:
    assert not compare(parts(0.9, 0.9, 1.0, 0.8), ROLES, 1.5)


def test_only_those_of_one_role_are_compared() -> None:
    roles = {0: "first stage", 1: "second stage", 2: "first stage", 3: "second stage"}
    assert not compare(parts(0.1, 0.5, 0.1, 0.5), roles, 1.5)
    assert list(compare(parts(0.1, 0.5, 0.1, 0.9), roles, 1.5)) == [3]
    assert not compare(parts(0.1, 0.9), {0: "a", 1: "b"}, 1.5), "alone in its role"


def test_the_slowest_part_counts_and_a_few_milliseconds_do_not() -> None:
    times = parts(0.1, 0.2, 0.1)
    times[1]["update"] = 0.4
    assert compare(times, ROLES, 1.5)[1].part == "update"
    assert not compare(parts(0.001, 0.009, 0.001), ROLES, 1.5)
    del times[0]["update"], times[2]["update"]
    assert compare(times, ROLES, 1.5)[1].part == "script", "what nobody else has measured cannot be compared"


class Trains:
    """Three nodes of one slot and, if *nodes_max* says so, a spare; all tell how long they take."""

    def __init__(self, *, nodes_max: int = 4, evict_slow: float = 0.0) -> None:
        limits = Limits(nodes_active=3, nodes_max=nodes_max, width=1, evict_slow=evict_slow)
        self.machine = Coordinator(limits, 0.0)
        self.nodes = [f"n{number}#1" for number in range(nodes_max)]
        for node in self.nodes:
            self.say(node, m.Register(node=node, fault_domain="", endpoint=ENDPOINT))
        self.come_to_life(1)

    def say(self, node: str, message: m.FromAgent) -> list[Effect]:
        return self.machine.handle(FromNode(node=node, message=message), 1.0)

    def come_to_life(self, generation: int) -> None:
        for node in self.nodes:
            self.say(node, m.NodeFenced(generation=generation, held=(), workers=()))
        assert self.machine.membership is not None
        for kind in (m.WorkerBuilt, m.WorkerConnected, m.WorkerReady):
            for slot, node in enumerate(self.machine.membership.places):
                more = {"shape": "s", "role": "r"} if kind is m.WorkerBuilt else {}
                self.say(node, kind(slot=slot, generation=generation, **more))  # type: ignore[arg-type]
        assert self.machine.phase is Phase.REDOING

    def beat(self, step: int, *script: float, generation: int = 1) -> list[Effect]:
        assert self.machine.membership is not None
        effects: list[Effect] = []
        for slot, node in enumerate(self.machine.membership.places):
            measured = {"script": script[slot]} if script[slot] else {}
            said = Progress(step=step, phase="script", issued=step, gate=step, parts_s=measured)
            effects += self.say(node, m.Heartbeat(generation=generation, acked={slot: step}, progress={slot: said}))
        return effects


def told(effects: list[Effect]) -> list[tuple[object, object]]:
    return [(e.fields["slot"], e.fields["node"]) for e in effects if isinstance(e, Record) and e.event == "slow_worker"]


def test_it_is_told_once_and_only_after_it_has_lasted() -> None:
    job = Trains()
    assert told(job.beat(5, 0.1, 0.0, 0.1)) == []
    assert told(job.beat(6, 0.1, 0.3, 0.1)) == []
    assert told(job.beat(6 + STEADY_STEPS - 1, 0.1, 0.3, 0.1)) == []
    assert told(job.beat(6 + STEADY_STEPS, 0.1, 0.3, 0.1)) == [(1, "n1#1")]
    assert told(job.beat(7 + STEADY_STEPS, 0.1, 0.3, 0.1)) == []
    assert job.machine.phase is Phase.TRAINING, "nothing is done about it"
    job.beat(8 + STEADY_STEPS, 0.1, 0.1, 0.1)
    assert told(job.beat(9 + STEADY_STEPS, 0.1, 0.3, 0.1)) == [], "it begins anew"
    assert told(job.beat(9 + 2 * STEADY_STEPS, 0.1, 0.3, 0.1)) == [(1, "n1#1")]


def test_it_is_given_up_if_that_was_asked_for_and_a_spare_is_there() -> None:
    job = Trains(evict_slow=2.0)
    job.beat(5, 0.1, 0.1, 0.19)
    assert told(job.beat(5 + STEADY_STEPS, 0.1, 0.1, 0.19)) == [(2, "n2#1")]
    assert job.machine.phase is Phase.TRAINING, "not slow enough"
    job.beat(20, 0.1, 0.3, 0.1)
    effects = job.beat(20 + STEADY_STEPS, 0.1, 0.3, 0.1)
    assert [e.node for e in effects if isinstance(e, Disconnect)] == ["n1#1"]
    stops = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Stop)]
    assert [stop.reason for stop in stops] == ["slot 1 takes 3.0 times as long as its peers in 'script'"]
    assert job.machine.membership is not None and job.machine.membership.places == ("n0#1", "n3#1", "n2#1")


def test_without_a_spare_a_slow_node_is_better_than_none() -> None:
    job = Trains(nodes_max=3, evict_slow=2.0)
    job.beat(5, 0.1, 0.3, 0.1)
    assert told(job.beat(5 + STEADY_STEPS, 0.1, 0.3, 0.1)) == [(1, "n1#1")]
    assert job.machine.phase is Phase.TRAINING
