"""Any order of events, from agents that are modelled as little as possible and report whatever they like."""

from __future__ import annotations

import math
from typing import Any

from coordinator_kit import dump, register
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Advice, Disconnect, Effect, Event, Exit, FromNode, Judged, NodeGone, Record, Send, Tick
from hotswap.core.past import recall
from hotswap.core.transitions import Phase
from hotswap.core.types import Held, HeldKind, SourceKind, WorkerState, host_of

LIMITS = Limits(nodes_active=2, nodes_max=4, width=2, checkpoints=True)
SLOTS = range(4)
STEPS = st.integers(0, 3)
NAMES = [f"n{number}#1" for number in range(1, 8)]
PICK = st.integers(0, 10**6)
HELD = st.sets(st.tuples(st.sampled_from(SLOTS), STEPS, st.sampled_from(list(HeldKind))), max_size=12)
WORKERS = st.dictionaries(st.sampled_from(SLOTS), st.tuples(STEPS, st.booleans(), st.booleans()))
OF_A_WORKER = (m.WorkerConnected, m.WorkerReady, m.WorkerFinished)


class Agent:
    """What an agent remembers of what it was told."""

    def __init__(self) -> None:
        self.fence: m.Fence | None = None
        self.plan: m.Plan | None = None
        self.training = False
        self.inbox: list[m.ToAgent] = []

    @property
    def plans(self) -> tuple[tuple[int, int], ...]:
        known = self.fence.plans if self.fence is not None else ()
        return (*known, (self.plan.generation, self.plan.resume_step)) if self.plan is not None else known

    @property
    def generation(self) -> int:
        return self.fence.generation if self.fence is not None else 0

    def slots(self, node: str) -> list[int]:
        places = self.fence.places if self.fence is not None else ()
        return [2 * places.index(node) + offset for offset in (0, 1)] if node in places else []

    def take(self) -> m.ToAgent:
        message = self.inbox.pop(0)
        if isinstance(message, m.Fence) and message.generation > self.generation:
            self.fence, self.plan, self.training = message, None, False
        elif isinstance(message, m.Plan) and message.generation == self.generation:
            self.plan = message
        elif isinstance(message, m.Go) and message.generation == self.generation:
            self.training = True
        return message


class Interleavings(RuleBasedStateMachine):
    @initialize(with_log=st.booleans())
    def begin(self, with_log: bool) -> None:
        self.now = 0.0
        self.with_log = with_log
        self.machine = Coordinator(LIMITS, self.now)
        self.log: list[dict[str, object]] = []
        self.agents: dict[str, Agent] = {}
        self.connected: list[str] = []
        self.memberships: dict[int, tuple[str, ...]] = {}
        self.reports: dict[str, m.NodeFenced] = {}
        self.planned: dict[int, m.Plan] = {}
        self.newest = 0

    # --- the world ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, FromNode) and isinstance(event.message, m.NodeFenced):
            self.reports[event.node] = event.message
        before = dump(self.machine)
        effects = self.machine.handle(event, self.now)
        if any(isinstance(effect, Record) and effect.event == "event_refused" for effect in effects):
            assert len(effects) == 1
            assert dump(self.machine) == before, "what is impossible has changed something"
        for effect in effects:
            self.follow(effect)
        return effects

    def follow(self, effect: Effect) -> None:
        if isinstance(effect, Record):
            self.log.append({"event": effect.event, **effect.fields})
        elif isinstance(effect, Disconnect):
            self.drop(effect.node)
        elif isinstance(effect, Send):
            self.check(effect.message)
            if effect.node in self.connected:
                self.agents[effect.node].inbox.append(effect.message)
        else:
            assert isinstance(effect, Exit) and self.machine.phase is Phase.STOPPED

    def check(self, message: m.ToAgent) -> None:
        if isinstance(message, m.Fence):
            known = self.memberships.setdefault(message.generation, message.places)
            if self.with_log:
                assert known == message.places, "two memberships of one generation"
                assert message.generation >= self.newest, "a generation that is over is announced"
            self.newest = max(self.newest, message.generation)
        elif isinstance(message, m.Plan):
            assert self.planned.setdefault(message.generation, message) == message, "two plans for one generation"
            self.check_sources(message)

    def check_sources(self, plan: m.Plan) -> None:
        """Every source was reported, at the resume step, by the node it is to be had from."""
        membership = self.machine.membership
        assert membership is not None and membership.generation == plan.generation
        assert sorted(plan.sources) == list(membership.slots)
        for slot, source in plan.sources.items():
            home = self.reports.get(membership.node_of(slot))
            own = home is not None and any(
                (held.slot, held.step, held.kind) == (slot, plan.resume_step, HeldKind.OWN) for held in home.held
            )
            if source.kind is SourceKind.OWN:
                assert own
            elif source.kind is SourceKind.LIVE:
                assert home is not None
                [state] = [state for state in home.workers if state.slot == slot]
                assert state.step == plan.resume_step and not state.torn and (own or not state.dirty)
            elif source.kind is SourceKind.REPLICA:
                held = self.reports[source.unique_from].held
                assert any((h.slot, h.step) == (slot, plan.resume_step) for h in held)
            assert membership.node_of(slot) not in plan.holders.get(slot, ())

    def drop(self, node: str) -> None:
        if node in self.connected:
            self.connected.remove(node)
            self.agents[node].inbox.clear()

    def pick(self, number: int) -> str:
        return self.connected[number % len(self.connected)]

    # --- nodes -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.agents) < len(NAMES))
    @rule()
    def join(self) -> None:
        node = NAMES[len(self.agents)]
        self.agents[node] = Agent()
        self.connected.append(node)
        self.handle(register(node))

    @precondition(lambda self: self.agents)
    @rule(number=PICK, lost=st.booleans(), finished=st.booleans())
    def connect_again(self, number: int, lost: bool, finished: bool) -> None:
        node = list(self.agents)[number % len(self.agents)]
        agent = self.agents[node]
        agent.inbox.clear()
        if node not in self.connected:
            self.connected.append(node)
        slots = agent.slots(node)
        self.handle(
            register(
                node,
                generation=agent.generation,
                places=agent.fence.places if agent.fence is not None else (),
                planned=agent.plan is not None,
                training=agent.training,
                acked=dict.fromkeys(slots, 1) if agent.training else {},
                lost=tuple(slots[:1]) if lost else (),
                finished=tuple(slots[1:]) if finished and agent.training else (),
                plans=agent.plans,
            )
        )

    @precondition(lambda self: self.connected)
    @rule(number=PICK)
    def cut(self, number: int) -> None:
        node = self.pick(number)
        self.drop(node)
        self.handle(NodeGone(node=node, reason="connection closed"))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, count=st.integers(1, 4), held=HELD, workers=WORKERS, checkpoint=st.none() | STEPS)
    def listen(self, number: int, count: int, held: Any, workers: Any, checkpoint: int | None) -> None:
        """An agent hears what it was told and answers as it should, with whatever it may hold."""
        node = self.pick(number)
        agent = self.agents[node]
        for _ in range(min(count, len(agent.inbox))):
            self.answer(node, agent, agent.take(), held, workers, checkpoint)

    def answer(self, node: str, agent: Agent, message: Any, held: Any, workers: Any, checkpoint: int | None) -> None:
        generation = agent.generation
        if isinstance(message, m.Fence):
            report = m.NodeFenced(
                generation=generation,
                held=tuple(Held(slot=slot, step=step, kind=kind) for slot, step, kind in sorted(held, key=repr)),
                workers=tuple(WorkerState(slot=s, step=k, dirty=d, torn=t) for s, (k, d, t) in workers.items()),
                checkpoint_step=checkpoint,
            )
            self.handle(FromNode(node=node, message=report))
        elif isinstance(message, m.Plan):
            for slot in agent.slots(node):
                self.handle(FromNode(node=node, message=m.WorkerBuilt(slot=slot, generation=generation, shape="s")))
                self.handle(FromNode(node=node, message=m.WorkerConnected(slot=slot, generation=generation)))
        elif isinstance(message, m.Halt):
            for slot in agent.slots(node):
                self.handle(FromNode(node=node, message=m.WorkerHalted(slot=slot, generation=generation, step=4)))
        elif isinstance(message, m.Go):
            acked = dict.fromkeys(agent.slots(node), 4)
            self.handle(FromNode(node=node, message=m.Heartbeat(generation=generation, acked=acked)))

    @precondition(lambda self: self.connected)
    @rule(number=PICK)
    def get_ready(self, number: int) -> None:
        node = self.pick(number)
        agent = self.agents[node]
        if agent.plan is not None:
            for slot in agent.slots(node):
                self.handle(FromNode(node=node, message=m.WorkerReady(slot=slot, generation=agent.generation)))

    # --- trouble -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected)
    @rule(number=PICK, slot=st.sampled_from(SLOTS), status=st.sampled_from([1, -9]))
    def lose_worker(self, number: int, slot: int, status: int) -> None:
        node = self.pick(number)
        generation = self.agents[node].generation
        self.handle(FromNode(node=node, message=m.WorkerLost(slot=slot, generation=generation, status=status)))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, slot=st.sampled_from(SLOTS), failed=st.booleans())
    def complain(self, number: int, slot: int, failed: bool) -> None:
        node = self.pick(number)
        kind = m.RestoreFailed if failed else m.WorkerTrouble
        message = kind(slot=slot, generation=self.agents[node].generation, detail="")
        self.handle(FromNode(node=node, message=message))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, slot=st.sampled_from(SLOTS), offset=st.integers(-2, 2), kind=st.sampled_from(OF_A_WORKER))
    def say_anything(self, number: int, slot: int, offset: int, kind: Any) -> None:
        node = self.pick(number)
        generation = max(0, self.agents[node].generation + offset)
        self.handle(FromNode(node=node, message=kind(slot=slot, generation=generation)))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, slot=st.sampled_from(SLOTS), step=STEPS, age=st.integers(0, 2))
    def write_checkpoint(self, number: int, slot: int, step: int, age: int) -> None:
        generation = max(0, self.agents[self.pick(number)].generation - age)
        shard = m.CheckpointShard(slot=slot, step=step, generation=generation)
        self.handle(FromNode(node=self.pick(number), message=shard))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, leaves_in_s=st.floats(0.0, 5.0))
    def drain(self, number: int, leaves_in_s: float) -> None:
        message = m.NodeDraining(leaves_in_s=leaves_in_s, reason="")
        self.handle(FromNode(node=self.pick(number), message=message))

    @precondition(lambda self: self.connected)
    @rule(number=PICK, step=st.integers(3, 5))
    def commit_checkpoint(self, number: int, step: int) -> None:
        self.handle(FromNode(node=self.pick(number), message=m.CheckpointCommitted(step=step)))

    @rule(advice=st.sampled_from(list(Advice)), number=PICK, slot=st.sampled_from(SLOTS))
    def judge(self, advice: Advice, number: int, slot: int) -> None:
        """A verdict comes when it comes, on whomever. Nodes that it bars are not used again."""
        host = host_of(NAMES[number % len(NAMES)])
        self.handle(Judged(advice=advice, reason="so the rules say", host=host, slot=slot))

    @invariant()
    def a_broken_node_gets_no_place(self) -> None:
        if self.machine.membership is None:
            return
        # Who had a place when the verdict came keeps it for as long as no spare is ready.
        for position, node in enumerate(self.machine.membership.places):
            if self.machine.job.counsel.excludes(node):
                assert any(places[position] == node for places in self.before_verdicts(node)), node

    def before_verdicts(self, node: str) -> list[tuple[str, ...]]:
        """Memberships that were announced before *node* was barred, its own newest place included."""
        barred = next(
            i for i, one in enumerate(self.log) if one.get("host") == host_of(node) and one.get("advice") == "exclude"
        )
        return [tuple(one["places"]) for one in self.log[:barred] if one["event"] == "recovery_started"]  # type: ignore[arg-type]

    @rule(kind=st.sampled_from([m.Heartbeat, m.WorkerBuilt]))
    def hear_a_stranger(self, kind: Any) -> None:
        extra = {} if kind is m.Heartbeat else {"slot": 0, "shape": ""}
        self.handle(FromNode(node="stranger#1", message=kind(generation=self.newest, **extra)))

    @rule(seconds=st.floats(0.0, 3.0), beat=st.booleans())
    def wait(self, seconds: float, beat: bool) -> None:
        self.now += seconds
        for node in list(self.connected) if beat else ():
            self.handle(FromNode(node=node, message=m.Heartbeat(generation=self.agents[node].generation)))
        self.handle(Tick())

    @rule()
    def wait_for_the_deadline(self) -> None:
        due = self.machine.deadline()
        if due < math.inf:
            self.now = max(self.now, due)
            self.handle(Tick())
            assert self.machine.phase is Phase.STOPPED or self.machine.deadline() > self.now, (
                "a deadline passes for nothing"
            )

    @rule()
    def restart_the_coordinator(self) -> None:
        for node in list(self.connected):
            self.drop(node)
        self.machine = Coordinator(LIMITS, self.now, recall(self.log) if self.with_log else None)

    # --- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def every_wait_ends(self) -> None:
        waits = (Phase.FORMING, Phase.RECOLLECTING, Phase.FENCING, Phase.WAITING, Phase.REBUILDING, Phase.RESTORING)
        if self.machine.phase in waits:
            assert self.machine.deadline() < math.inf

    @invariant()
    def members_are_known_to_be_there(self) -> None:
        job = self.machine.job
        if job.phase in (Phase.FENCING, Phase.REBUILDING, Phase.RESTORING):
            assert all(node in job.roster for node in job.current.places)
        # A coordinator that has stopped listens to nobody any more.
        if job.phase is not Phase.STOPPED:
            assert all(node in self.connected for node in job.roster)

    @invariant()
    def who_leaves_takes_no_place(self) -> None:
        job = self.machine.job
        assert not {*job.roster.leaving}.intersection(job.spares())

    @invariant()
    def going_means_that_everyone_was_ready(self) -> None:
        job = self.machine.job
        if job.phase is Phase.REDOING:
            assert job.attempt.ready == set(SLOTS)
            assert job.attempt.connected == set(SLOTS)


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestInterleavings = Interleavings.TestCase
