"""The one decider of a job: ``handle(event, now) -> effects``.

Soft state: a new coordinator learns everything from the agents' registrations, so it may be killed at any moment. Time is
an argument (seconds of any monotonic clock). All transitions are in ``transitions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hotswap.core import messages as m
from hotswap.core import placement, resume
from hotswap.core.detector import SilenceDetector
from hotswap.core.events import Disconnect, Effect, Event, Exit, FromNode, NodeGone, Record, Send, StopAsked, Tick
from hotswap.core.keep import groups_to_keep
from hotswap.core.transitions import TRANSITIONS, Kind, Phase
from hotswap.core.types import (
    Endpoint,
    Generation,
    Membership,
    NodeId,
    Role,
    Slot,
    Source,
    SourceKind,
    Step,
    node_order,
)
from hotswap.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USER_ERROR

_KINDS: dict[type, Kind] = {
    m.Register: Kind.REGISTERED,
    m.Heartbeat: Kind.HEARTBEAT,
    m.WorkerBuilt: Kind.BUILT,
    m.WorkerLost: Kind.LOST,
    m.WorkerTrouble: Kind.TROUBLE,
    m.NodeFenced: Kind.FENCED,
    m.WorkerConnected: Kind.CONNECTED,
    m.WorkerReady: Kind.READY,
    m.WorkerFinished: Kind.FINISHED,
    m.RestoreFailed: Kind.RESTORE_FAILED,
    m.CheckpointShard: Kind.SHARD_DURABLE,
    NodeGone: Kind.GONE,
    Tick: Kind.TICK,
    StopAsked: Kind.STOP_ASKED,
}

_PHASE_NAMES = {
    Phase.FENCING: "fence",
    Phase.WAITING: "plan",
    Phase.REBUILDING: "rebuild",
    Phase.RESTORING: "restore",
    Phase.REDOING: "redo",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a job. Times in seconds.

    ``phase_s``: longest time a phase may take once every worker is built; ``build_s``: longest time for building one;
    ``last_call_s``: how long a complete job waits for further spares; ``recoveries_max``: recoveries without a newly
    committed step in between, after which going on is pointless.
    """

    nodes_active: int
    nodes_max: int
    width: int
    detection_budget_s: float = 5.0
    phase_s: float = 30.0
    build_s: float = 600.0
    join_s: float = 600.0
    last_call_s: float = 2.0
    spare_wait_s: float = 60.0
    trouble_grace_s: float = 1.0
    respawns_max: int = 3
    recoveries_max: int = 10


@dataclass(kw_only=True)
class _Node:
    register: m.Register
    built: dict[Slot, m.WorkerBuilt] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Recovery:
    """One attempt to bring a generation to life."""

    cause: str
    started_at: float
    phase_at: float
    lost: frozenset[Slot]
    fenced: dict[NodeId, m.NodeFenced] = field(default_factory=dict)
    connected: set[Slot] = field(default_factory=set)
    ready: set[Slot] = field(default_factory=set)
    resume_step: Step = 0
    redone: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """Pure state machine; see the module's docstring. Not thread-safe: one caller."""

    def __init__(self, limits: Limits, now: float) -> None:
        """Start with no knowledge at all."""
        self.limits = limits
        self.phase = Phase.FORMING
        self.membership: Membership | None = None
        self.nodes: dict[NodeId, _Node] = {}
        self.detector = SilenceDetector(limits.detection_budget_s)
        self.acked: dict[Slot, Step] = {}
        self.committed: Step | None = None
        self.recovery: _Recovery | None = None
        self._peers: dict[Slot, tuple[Slot, ...]] = {}
        self._finished: set[Slot] = set()
        self._shards: dict[Step, set[Slot]] = {}
        self._started = False
        self._recoveries = 0
        self._respawns: dict[Slot, int] = {}
        self._newest_generation: Generation = 0
        self._born_at = now
        self._complete_at: float | None = None
        self._waiting_since = now
        self._trouble: tuple[float, str] | None = None
        self._built_at = now
        self._out: list[Effect] = []

    # --- the two entry points --------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply *event*; an impossible one changes nothing and says so in a ``event_refused`` record."""
        self._out = []
        kind = _KINDS[type(event.message)] if isinstance(event, FromNode) else _KINDS[type(event)]
        if isinstance(event, FromNode):
            self.detector.heard(event.node, now) if event.node in self.nodes else None
        refusal = self._refusal(event, kind)
        if refusal is not None:
            return (
                [] if refusal == "" else [Record(event="event_refused", fields={"what": kind.value, "reason": refusal})]
            )
        before = self.phase
        self._dispatch(event, now)
        allowed = TRANSITIONS[before, kind]
        assert self.phase in allowed, f"{kind.value}: {before.value} -> {self.phase.value} is not in the table"
        return self._out

    def deadline(self) -> float:
        """When the next Tick is due at the latest."""
        due = [self._phase_deadline()]
        if self._trouble is not None:
            due.append(self._trouble[0])
        silence = self.detector.deadline()
        if silence is not None:
            due.append(silence)
        return min(due)

    # --- what may happen when --------------------------------------------------------------------------------------

    def _refusal(self, event: Event, kind: Kind) -> str | None:
        """None: go on. Empty: late news of an older generation, normal. Otherwise the reason why it is impossible."""
        if self.phase is Phase.STOPPED or self._is_stale(event, kind):
            return ""
        if (self.phase, kind) not in TRANSITIONS:
            return f"cannot happen while {self.phase.value}"
        if not isinstance(event, FromNode):
            return None
        if kind is not Kind.REGISTERED and event.node not in self.nodes:
            return f"{event.node} is not registered"
        generation = getattr(event.message, "generation", 0)
        newest = self.membership.generation if self.membership is not None else 0
        if generation > newest and self.phase not in (Phase.FORMING, Phase.RECOLLECTING):
            return f"{event.node} speaks of generation {generation}, which was never committed (newest: {newest})"
        return None

    def _is_stale(self, event: Event, kind: Kind) -> bool:
        """Late news of an older generation. A death stays a death, and a model once built stays built."""
        if not isinstance(event, FromNode) or self.membership is None:
            return False
        if kind in (Kind.REGISTERED, Kind.HEARTBEAT, Kind.BUILT, Kind.LOST, Kind.SHARD_DURABLE):
            return False
        return getattr(event.message, "generation", 0) < self.membership.generation

    def _dispatch(self, event: Event, now: float) -> None:
        if isinstance(event, FromNode):
            handlers: dict[type, Callable[[NodeId, m.FromAgent, float], None]] = {
                m.Register: self._on_register,
                m.Heartbeat: self._on_heartbeat,
                m.WorkerBuilt: self._on_built,
                m.WorkerLost: self._on_worker_lost,
                m.WorkerTrouble: self._on_trouble,
                m.NodeFenced: self._on_fenced,
                m.WorkerConnected: self._on_connected,
                m.WorkerReady: self._on_ready,
                m.WorkerFinished: self._on_finished,
                m.RestoreFailed: self._on_restore_failed,
                m.CheckpointShard: self._on_shard,
            }
            handlers[type(event.message)](event.node, event.message, now)
        elif isinstance(event, NodeGone):
            self._on_gone(event, now)
        elif isinstance(event, StopAsked):
            self._stop(event.exit_code, event.reason)
        else:
            self._on_tick(now)

    # --- nodes come and go -----------------------------------------------------------------------------------------

    def _on_register(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.Register)
        if len(self.nodes) >= self.limits.nodes_max and node not in self.nodes:
            self._record("node_surplus", node=node)
        self.nodes[node] = _Node(register=message, built={built.slot: built for built in message.built})
        self.detector.heard(node, now)
        self._learn(message)
        if self.phase in (Phase.FORMING, Phase.RECOLLECTING):
            self._record("node_joined", node=node, role="" if message.generation == 0 else self._role(node).value)
            self._form_or_recollect(now)
        else:
            self._welcome(node, message, now)

    def _learn(self, message: m.Register) -> None:
        """Take over what only the agents know after a coordinator restart."""
        self._newest_generation = max(self._newest_generation, message.generation)
        if message.generation and (self.membership is None or message.generation > self.membership.generation):
            self.membership = Membership(generation=message.generation, places=message.places, width=self.limits.width)
            self.phase = Phase.RECOLLECTING
        for built in message.built:
            self._peers[built.slot] = built.peers
        for slot, step in message.acked.items():
            self.acked[slot] = max(step, self.acked.get(slot, step))
        self._finished.update(message.finished)
        self._started = self._started or message.training or bool(message.acked)

    def _welcome(self, node: NodeId, message: m.Register, now: float) -> None:
        """A node that arrives while the job runs becomes a spare; so does a member that had been given up."""
        assert self.membership is not None
        if (
            node in self.membership.places
            and message.generation < self.membership.generation
            and self.phase is not Phase.WAITING
        ):
            # It was told of this generation on a connection that broke; tell it again.
            self._send(node, self._fence_message(node))
            return
        self._record("node_joined", node=node, role=self._role(node).value)
        if self.phase is Phase.WAITING:
            self._recover(f"{node} joined", now)
        else:
            self._send(node, self._fence_message(node))

    def _form_or_recollect(self, now: float) -> None:
        if self.phase is Phase.RECOLLECTING:
            assert self.membership is not None
            if all(node in self.nodes for node in self.membership.places):
                self._take_over(now)
            return
        if len(self.nodes) >= self.limits.nodes_active and self._complete_at is None:
            self._complete_at = now
        if len(self.nodes) >= self.limits.nodes_max:
            self._form(now)

    def _form(self, now: float) -> None:
        order = sorted(self.nodes, key=node_order)
        self.membership = Membership(
            generation=self._newest_generation + 1,
            places=tuple(order[: self.limits.nodes_active]),
            width=self.limits.width,
        )
        self._record("job_started", nodes=list(order), width=self.limits.width)
        self._fence(frozenset(self.membership.slots), "start", now)

    def _take_over(self, now: float) -> None:
        """Every member is heard or given up: go on training if nothing happened meanwhile, else recover."""
        assert self.membership is not None
        members = [self.nodes[node] for node in self.membership.places if node in self.nodes]
        whole = len(members) == len(self.membership.places)
        newest = all(node.register.generation == self.membership.generation for node in members)
        calm = all(node.register.training and not node.register.lost for node in members)
        self._record("coordinator_took_over", members=len(members))
        if whole and newest and calm:
            self.phase = Phase.TRAINING
            self._recommit(now)
            for node in self._spares():
                self._send(node, self._fence_message(node))
            return
        lost = {slot for node in members for slot in node.register.lost}
        self._recover("the coordinator restarted", now, lost=lost)

    def _on_gone(self, event: NodeGone, now: float) -> None:
        node = event.node
        if self.nodes.pop(node, None) is None:
            return
        self.detector.forget(node)
        role = self._role(node)
        self._record("node_lost", node=node, role=role.value, reason=event.reason)
        if self.phase in (Phase.FORMING, Phase.RECOLLECTING):
            if len(self.nodes) < self.limits.nodes_active:
                self._complete_at = None
            return
        assert self.membership is not None
        if role is Role.ACTIVE and not self._finished.issuperset(self.membership.slots_of(node)):
            self._recover(f"{node} lost: {event.reason}", now)

    # --- workers ---------------------------------------------------------------------------------------------------

    def _on_built(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerBuilt)
        self.nodes[node].built[message.slot] = message
        self._peers.setdefault(message.slot, message.peers)
        self._built_at = now
        if self._role(node) is Role.SPARE and len(self.nodes[node].built) % self.limits.width == 0:
            self._record(
                "spare_ready",
                node=node,
                positions=sorted({slot // self.limits.width for slot in self.nodes[node].built}),
            )

    def _on_worker_lost(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerLost)
        assert self.membership is not None
        slot = message.slot
        self.nodes[node].built.pop(slot, None)
        if slot not in self.membership.slots_of(node) or slot in self._finished:
            return
        self._record("worker_lost", slot=slot, node=node, status=message.status, detail=message.detail)
        if not self._started and message.status > 0:
            self._stop(EXIT_USER_ERROR, f"the worker of slot {slot} failed before the first step: {message.detail}")
            return
        self._respawns[slot] = self._respawns.get(slot, 0) + 1
        if self._respawns[slot] <= self.limits.respawns_max:
            self._recover(f"worker of slot {slot} lost ({message.detail})", now, lost={slot})
        elif message.status < 0 and self._spares():
            self._respawns.clear()
            self._evict(node, f"worker of slot {slot} lost {self.limits.respawns_max + 1} times without progress", now)
        else:
            code = EXIT_USER_ERROR if message.status > 0 else 128 - message.status
            self._stop(code, f"the worker of slot {slot} failed again and again without progress: {message.detail}")

    def _on_trouble(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerTrouble)
        if self._trouble is None and self.phase not in (Phase.FENCING, Phase.WAITING):
            self._record("worker_trouble", slot=message.slot, node=node, detail=message.detail)
            self._trouble = (
                now + self.limits.trouble_grace_s,
                f"a collective failed on slot {message.slot}: {message.detail}",
            )

    def _on_finished(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerFinished)
        assert self.membership is not None
        self._finished.add(message.slot)
        if self._finished.issuperset(self.membership.slots):
            self._stop(EXIT_OK, "every worker finished")

    def _on_heartbeat(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.Heartbeat)
        current = self.membership
        if (
            current is None
            or message.generation != current.generation
            or self.phase not in (Phase.TRAINING, Phase.REDOING)
        ):
            return
        for slot in current.slots_of(node):
            if slot in message.acked:
                self.acked[slot] = max(message.acked[slot], self.acked.get(slot, 0))
        self._recommit(now)

    def _recommit(self, now: float) -> None:
        assert self.membership is not None
        if any(slot not in self.acked for slot in self.membership.slots):
            return
        step = min(self.acked[slot] for slot in self.membership.slots)
        if self.committed is not None and step <= self.committed:
            return
        self.committed = step
        self._recoveries = 0
        self._respawns.clear()
        self._record("step_committed", step=step)
        if self.phase is Phase.REDOING and self.recovery is not None and step > self.recovery.resume_step:
            self._enter(Phase.TRAINING, now)
            self._record_recovery(self.recovery, now)

    def _record_recovery(self, recovery: _Recovery, now: float) -> None:
        phases = {
            name: round(recovery.phases_ms.get(name, 0.0), 3)
            for name in ("fence", "plan", "rebuild", "restore", "redo")
        }
        total = round(1000 * (now - recovery.started_at), 3)
        self._record(
            "recovery_done",
            cause=recovery.cause,
            resume_step=recovery.resume_step,
            redone_steps=recovery.redone,
            phases_ms={**phases, "total": total},
        )

    # --- a recovery ------------------------------------------------------------------------------------------------

    def _recover(self, cause: str, now: float, lost: Iterable[Slot] = ()) -> None:
        """Fence the generation and begin the next one, with spares in the places of lost nodes."""
        assert self.membership is not None
        self._recoveries += 1
        if self._recoveries > self.limits.recoveries_max:
            self._stop(
                EXIT_REQUEUE,
                f"{self._recoveries - 1} recoveries without a newly committed step; the last cause: {cause}",
            )
            return
        dead = [position for position, node in enumerate(self.membership.places) if node not in self.nodes]
        fills = self._fill(dead)
        gone = {slot for position in fills for slot in self.membership.slots_at(position)}
        unfinished = self.recovery.lost if self.recovery is not None and self.phase in _PHASE_NAMES else frozenset()
        replaced = [self.membership.places[position] for position in fills]
        self.membership = self.membership.replace(fills)
        self._newest_generation = max(self._newest_generation, self.membership.generation)
        for position, (node, old) in zip(fills, zip(fills.values(), replaced, strict=True), strict=True):
            hot = all(slot in self.nodes[node].built for slot in self.membership.slots_at(position))
            self._record("spare_promoted", node=node, replaces=old, position=position, hot=hot)
        # A process that was new in a generation that never came to life still holds nothing.
        still_new = {slot for slot in unfinished if not self._holds_state(slot)}
        self._fence(frozenset({*lost, *gone, *still_new}), cause, now)
        if len(fills) < len(dead):
            self._waiting_since = now
            self._enter(Phase.WAITING, now)
            self._record("waiting_for_node", missing=len(dead) - len(fills), wait_s=self.limits.spare_wait_s)

    def _holds_state(self, slot: Slot) -> bool:
        return self.recovery is not None and slot in self.recovery.ready

    def _fill(self, dead: list[int]) -> dict[int, NodeId]:
        """A spare for each dead position, one that has already built that position's workers if there is one."""
        assert self.membership is not None
        spares = self._spares()
        fills: dict[int, NodeId] = {}
        for position in dead:
            slots = self.membership.slots_at(position)
            spares.sort(key=lambda node: (-sum(slot in self.nodes[node].built for slot in slots), node_order(node)))
            if spares:
                fills[position] = spares.pop(0)
        return fills

    def _fence(self, lost: frozenset[Slot], cause: str, now: float) -> None:
        assert self.membership is not None
        self._trouble = None
        previous = self.recovery if self.phase in _PHASE_NAMES else None
        started_at = previous.started_at if previous is not None else now
        self.recovery = _Recovery(cause=cause, started_at=started_at, phase_at=now, lost=lost)
        self._finished.clear()
        self.phase = Phase.FENCING
        self._record("recovery_started", cause=cause, lost=sorted(lost), places=list(self.membership.places))
        self._record("phase_started", phase="fence")
        for node in sorted(self.nodes, key=node_order):
            self._send(node, self._fence_message(node))

    def _fence_message(self, node: NodeId) -> m.Fence:
        assert self.membership is not None
        endpoints: dict[NodeId, Endpoint] = {name: item.register.endpoint for name, item in self.nodes.items()}
        lost = tuple(sorted(self.recovery.lost)) if self.recovery is not None else ()
        return m.Fence(
            generation=self.membership.generation,
            places=self.membership.places,
            endpoints=endpoints,
            lost=lost,
            positions=self._positions_for(node),
        )

    def _positions_for(self, node: NodeId) -> tuple[int, ...]:
        """Positions in the order in which a spare should build for them: spares are spread over the positions."""
        assert self.membership is not None
        spares = self._spares()
        if node not in spares:
            return ()
        count = len(self.membership.places)
        first = spares.index(node) % count
        return tuple((first + offset) % count for offset in range(count))

    def _on_fenced(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.NodeFenced)
        assert self.recovery is not None
        assert self.membership is not None
        self.recovery.fenced[node] = message
        if self.phase is Phase.FENCING and all(member in self.recovery.fenced for member in self.membership.places):
            self._plan(self.recovery, now)

    def _plan(self, recovery: _Recovery, now: float) -> None:
        assert self.membership is not None
        self._close_phase(recovery, "fence", now)
        ledger = self._ledger(recovery)
        choice = resume.choose(self.membership.slots, ledger) or self._without_memory(recovery)
        if choice is None:
            self._stop(
                EXIT_REQUEUE,
                "a slot's owner and all holders of its replica are gone and there is no durable checkpoint; "
                "a new run starts from the beginning (set --checkpoint-dir to bound such a loss)",
            )
            return
        recovery.resume_step = choice.step
        recovery.redone = resume.redone_steps(ledger.live, choice.step)
        holders = placement.holders(self.membership, self._domains(), self._spares())
        plan = m.Plan(
            generation=self.membership.generation,
            resume_step=choice.step,
            sources=choice.sources,
            holders=holders,
            push=tuple(
                slot
                for slot in holders
                if choice.step not in ledger.replicas.get(slot, {})
                or holders[slot] not in ledger.replicas[slot][choice.step]
            ),
            keep=tuple(sorted(self._keep(recovery))),
        )
        self.acked = {}
        self.committed = None
        self._record_plan(choice, plan)
        for node in sorted(self.nodes, key=node_order):
            self._send(node, plan)
        self._enter(Phase.REBUILDING, now)

    def _ledger(self, recovery: _Recovery) -> resume.Ledger:
        assert self.membership is not None
        ledger = resume.Ledger(peers=dict(self._peers))
        for node, report in recovery.fenced.items():
            if node in self.nodes:
                ledger.add(node, report.held, self.membership.slots_of(node))
                ledger.live.update(
                    {worker.slot: worker for worker in report.workers if worker.slot not in recovery.lost}
                )
        return ledger

    def _without_memory(self, recovery: _Recovery) -> resume.Resume | None:
        """The newest durable checkpoint; the very beginning if the job never got anywhere."""
        assert self.membership is not None
        known = [report.checkpoint_step for report in recovery.fenced.values() if report.checkpoint_step is not None]
        slots = self.membership.slots
        if known:
            step = max(known)
            self._record("restored_from_checkpoint", step=step, first_start=not self._started)
            return resume.Resume(step=step, sources={slot: Source(kind=SourceKind.CHECKPOINT) for slot in slots})
        if not self._started:
            return resume.Resume(step=0, sources={slot: Source(kind=SourceKind.FRESH) for slot in slots})
        return None

    def _keep(self, recovery: _Recovery) -> frozenset[str]:
        reports = {slot: groups for report in recovery.fenced.values() for slot, groups in report.groups.items()}
        return groups_to_keep(reports, recovery.lost)

    def _record_plan(self, choice: resume.Resume, plan: m.Plan) -> None:
        sources: dict[str, str] = {str(slot): source.kind.value for slot, source in choice.sources.items()}
        self._record(
            "recovery_planned", resume_step=choice.step, sources=dict(sources), keep=len(plan.keep), push=len(plan.push)
        )
        self._record("phase_started", phase="rebuild")

    def _on_connected(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerConnected)
        assert self.recovery is not None
        assert self.membership is not None
        self.recovery.connected.add(message.slot)
        if self.recovery.connected.issuperset(self.membership.slots):
            self._enter(Phase.RESTORING, now)
            self._record("phase_started", phase="restore")

    def _on_ready(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.WorkerReady)
        assert self.recovery is not None
        assert self.membership is not None
        self.recovery.ready.add(message.slot)
        if self.phase is Phase.RESTORING and self.recovery.ready.issuperset(self.membership.slots):
            self._go(self.recovery, now)

    def _go(self, recovery: _Recovery, now: float) -> None:
        assert self.membership is not None
        self.acked = dict.fromkeys(self.membership.slots, recovery.resume_step)
        self.committed = recovery.resume_step
        self._started = True
        self._enter(Phase.REDOING, now)
        self._record("training_started", step=recovery.resume_step)
        self._record("phase_started", phase="redo")
        for node in self.membership.places:
            self._send(node, m.Go(generation=self.membership.generation))

    def _on_restore_failed(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.RestoreFailed)
        self._record("restore_failed", slot=message.slot, node=node, detail=message.detail)
        self._recover(f"slot {message.slot} could not be restored: {message.detail}", now)

    def _on_shard(self, node: NodeId, message: m.FromAgent, now: float) -> None:
        assert isinstance(message, m.CheckpointShard)
        if self.membership is None or node not in self.membership.places:
            return
        shards = self._shards.setdefault(message.step, set())
        shards.add(message.slot)
        if shards.issuperset(self.membership.slots):
            for step in [step for step in self._shards if step <= message.step]:
                del self._shards[step]
            self._send(node, m.CommitCheckpoint(step=message.step, slots=len(self.membership.slots)))
            self._record("checkpoint_written", step=message.step)

    # --- time ------------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> None:
        for node in self.detector.silent(now):
            self._out.append(Disconnect(node=node, reason="silent"))
            self._on_gone(NodeGone(node=node, reason=f"silent for more than {self.limits.detection_budget_s:g} s"), now)
            if self.phase is Phase.STOPPED:
                return
        if self._trouble is not None and now >= self._trouble[0]:
            self._recover(self._trouble[1], now)
        elif now >= self._phase_deadline():
            self._on_phase_deadline(now)

    def _phase_deadline(self) -> float:
        far = float("inf")
        if self.phase is Phase.FORMING:
            last_call = self._complete_at + self.limits.last_call_s if self._complete_at is not None else far
            return min(last_call, self._born_at + self.limits.join_s)
        if self.phase is Phase.RECOLLECTING:
            return self._born_at + self.limits.detection_budget_s
        if self.phase is Phase.WAITING:
            return self._waiting_since + self.limits.spare_wait_s
        if self.recovery is None or self.phase not in (Phase.FENCING, Phase.REBUILDING, Phase.RESTORING):
            return far
        if self.phase is Phase.REBUILDING and self._unbuilt():
            return self.recovery.phase_at + self.limits.build_s
        return max(self.recovery.phase_at, self._built_at) + self.limits.phase_s

    def _unbuilt(self) -> list[Slot]:
        assert self.membership is not None
        return [
            s
            for s in self.membership.slots
            if (n := self.membership.node_of(s)) not in self.nodes or s not in self.nodes[n].built
        ]

    def _on_phase_deadline(self, now: float) -> None:
        if self.phase is Phase.FORMING:
            if self._complete_at is not None:
                self._form(now)
            else:
                self._stop(
                    EXIT_REQUEUE,
                    f"{len(self.nodes)} of {self.limits.nodes_active} nodes joined within {self.limits.join_s:g} s",
                )
        elif self.phase is Phase.RECOLLECTING:
            self._take_over(now)
        elif self.phase is Phase.WAITING:
            self._stop(EXIT_REQUEUE, f"no spare and no new node within {self.limits.spare_wait_s:g} s")
        else:
            for node in self._laggards():
                self._evict(node, f"did not get through '{_PHASE_NAMES[self.phase]}' in time", now)
                return

    def _laggards(self) -> list[NodeId]:
        """Members the phase still waits for."""
        assert self.membership is not None
        assert self.recovery is not None
        if self.phase is Phase.FENCING:
            return [node for node in self.membership.places if node not in self.recovery.fenced]
        done = self.recovery.connected if self.phase is Phase.REBUILDING else self.recovery.ready
        return [node for node in self.membership.places if not done.issuperset(self.membership.slots_of(node))]

    def _evict(self, node: NodeId, reason: str, now: float) -> None:
        """Give up a node that is still connected: it gets nothing more to do in this job."""
        self._send(node, m.Stop(exit_code=EXIT_REQUEUE, reason=reason))
        self._out.append(Disconnect(node=node, reason=reason))
        self._on_gone(NodeGone(node=node, reason=reason), now)

    # --- small helpers ---------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        if self.recovery is not None and self.phase in _PHASE_NAMES:
            self._close_phase(self.recovery, _PHASE_NAMES[self.phase], now)
        self.phase = phase

    def _close_phase(self, recovery: _Recovery, name: str, now: float) -> None:
        elapsed = 1000 * (now - recovery.phase_at)
        recovery.phase_at = now
        if name in recovery.phases_ms:
            return
        recovery.phases_ms[name] = elapsed
        self._record("phase_ended", phase=name, ms=round(elapsed, 3))

    def _role(self, node: NodeId) -> Role:
        member = self.membership is not None and node in self.membership.places
        return Role.ACTIVE if member else Role.SPARE

    def _spares(self) -> list[NodeId]:
        return sorted((node for node in self.nodes if self._role(node) is Role.SPARE), key=node_order)

    def _domains(self) -> dict[NodeId, str]:
        return {node: item.register.fault_domain for node, item in self.nodes.items()}

    def _send(self, node: NodeId, message: m.ToAgent) -> None:
        self._out.append(Send(node=node, message=message))

    def _record(self, event: str, **fields: object) -> None:
        generation = self.membership.generation if self.membership is not None else 0
        self._out.append(Record(event=event, fields={"generation": generation, **fields}))  # type: ignore[dict-item]

    def _stop(self, exit_code: int, reason: str) -> None:
        self.phase = Phase.STOPPED
        self._record("job_stopped", exit_code=exit_code, reason=reason)
        for node in sorted(self.nodes, key=node_order):
            self._send(node, m.Stop(exit_code=exit_code, reason=reason))
        self._out.append(Exit(exit_code=exit_code, reason=reason))
