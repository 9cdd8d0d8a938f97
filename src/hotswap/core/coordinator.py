"""The one decider of a job: ``handle(event, now) -> effects``.

Soft state: a new coordinator learns everything from the agents' registrations, so it may be killed at any moment. Time is
an argument (seconds of any monotonic clock). All transitions are in ``transitions.py``, what is done in ``job.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hotswap.core import counsel, drain, losses, repair, resize, salvage, slowness, standstill, waiting
from hotswap.core import messages as m
from hotswap.core.events import Effect, Event, FromNode, Judged, NodeGone, Record, Scalar, StopAsked
from hotswap.core.job import Job
from hotswap.core.limits import Limits
from hotswap.core.past import Past
from hotswap.core.recovery import PHASE_NAMES
from hotswap.core.transitions import (
    KINDS,
    NEVER_STALE,
    OF_A_MEMBER,
    OF_A_RECOVERY,
    OF_A_SLOT,
    TRAINS,
    TRANSITIONS,
    Kind,
    Phase,
)
from hotswap.core.types import Membership, NodeId, Role, names_of, node_order
from hotswap.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USER_ERROR

__all__ = ["Coordinator", "Limits"]

_LATE_NEWS = ""


class Coordinator:
    """Pure state machine; see the module's docstring. Not thread-safe: one caller."""

    def __init__(self, limits: Limits, now: float, past: Past | None = None) -> None:
        """Start with no knowledge but, at best, what the event log of an earlier coordinator says (``past.recall``)."""
        self.limits = limits
        self.job = Job(limits, past or Past())
        self._born_at = now
        # Nodes of the job that has been must not be forestalled by new ones.
        self._form_from = now + limits.detection_budget_s if self.job.generations.newest else now
        self._complete_at: float | None = None
        self._recollecting_since = now
        self._handlers: dict[Kind, Callable[[Any, Any, float], None]] = {
            Kind.REGISTERED: self._on_register,
            Kind.HEARTBEAT: self._on_heartbeat,
            Kind.BUILT: self._on_built,
            Kind.LOST: lambda node, message, now: losses.on_lost(self.job, node, message, now),
            Kind.TROUBLE: lambda node, message, now: losses.on_trouble(self.job, node, message, now),
            Kind.FENCED: self._on_fenced,
            Kind.CONNECTED: self._on_connected,
            Kind.READY: self._on_ready,
            Kind.FINISHED: self._on_finished,
            Kind.RESTORE_FAILED: self._on_restore_failed,
            Kind.SHARD_DURABLE: self._on_shard,
            Kind.CHECKPOINT_COMMITTED: self._on_checkpoint_committed,
            Kind.PACED: self._on_paced,
            Kind.RAISED: lambda node, message, _: losses.on_raised(self.job, node, message),
            Kind.DRAINING: lambda node, message, now: drain.ask(self.job, node, message, now),
            Kind.HALTED: lambda _, message, now: drain.on_halted(self.job, message, now),
            Kind.COMPARED: lambda _, message, now: repair.heed(self.job, message, now),
        }

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self.job.phase

    @property
    def membership(self) -> Membership | None:
        """The newest membership, None before there is one."""
        return self.job.membership

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply *event*; an impossible one changes nothing and says so in an ``event_refused`` record."""
        kind = KINDS[type(event.message)] if isinstance(event, FromNode) else KINDS[type(event)]
        refusal = self._refusal(event, kind)
        if refusal is not None and refusal != _LATE_NEWS:
            return [Record(event="event_refused", fields={"what": kind.value, "reason": refusal})]
        self.job.out = []
        if isinstance(event, FromNode) and event.node in self.job.roster:
            self.job.detector.heard(event.node, now)
        if refusal is None:
            before = self.phase
            self._dispatch(event, kind, now)
            if self.phase is Phase.TRAINING:
                drain.look(self.job)
                resize.look(self.job, now)
            allowed = TRANSITIONS[before, kind]
            assert self.phase in allowed, f"{kind.value}: {before.value} -> {self.phase.value} is not in the table"
        return self.job.out

    def deadline(self) -> float:
        """When the next Tick is due at the latest."""
        if self.phase is Phase.STOPPED:
            return float("inf")
        due = [self._phase_deadline()]
        if self.job.trouble is not None and self.job.running:
            due.append(self.job.trouble[0])
        if self.phase in TRAINS:
            due.append(self.job.watch.deadline())
        if self.phase is Phase.TRAINING:
            due.append(min(drain.deadline(self.job), resize.deadline(self.job)))
        silence = self.job.detector.deadline()
        if silence is not None:
            due.append(silence)
        return min(due)

    # --- what may happen when --------------------------------------------------------------------------------------

    def _refusal(self, event: Event, kind: Kind) -> str | None:
        """None: go on. Late news of an older generation is normal and has no effect. Otherwise why it is impossible."""
        if self.phase is Phase.STOPPED:
            return _LATE_NEWS
        if isinstance(event, FromNode) and (reason := self._refusal_of_node(event, kind)) is not None:
            return reason
        return None if (self.phase, kind) in TRANSITIONS else f"cannot happen while {self.phase.value}"

    def _refusal_of_node(self, event: FromNode, kind: Kind) -> str | None:
        node, message = event.node, event.message
        if isinstance(message, m.Register):
            return self._refusal_to_register(node, message)
        if node not in self.job.roster:
            return f"{node} is not registered"
        generation = getattr(message, "generation", 0)
        newest = self.membership.generation if self.membership is not None else 0
        if generation > newest:
            return f"{node} speaks of generation {generation}, which was never committed (newest: {newest})"
        if kind not in NEVER_STALE and generation < newest:
            return _LATE_NEWS
        if kind in OF_A_SLOT and generation < self.job.size_since:
            return _LATE_NEWS
        if kind in OF_A_RECOVERY and self.phase is Phase.RECOLLECTING:
            return _LATE_NEWS
        slot = getattr(message, "slot", None)
        if kind in OF_A_MEMBER and self.membership is not None and slot not in self.membership.slots_of(node):
            return f"{node} does not have slot {slot}"
        return None

    def _refusal_to_register(self, node: NodeId, message: m.Register) -> str | None:
        if message.node != node:
            return f"{node} calls itself {message.node}"
        if message.generation and len(set(message.places)) not in resize.sizes(self.limits):
            return f"{node} was in a job of {len(message.places)} active nodes, this one has {self.limits.nodes_active}"
        return None

    def _dispatch(self, event: Event, kind: Kind, now: float) -> None:
        if isinstance(event, FromNode):
            self._handlers[kind](event.node, event.message, now)
        elif isinstance(event, NodeGone):
            if event.node in self.job.roster:
                self._lose({event.node: event.reason}, now)
        elif isinstance(event, StopAsked):
            self.job.stop(event.exit_code, event.reason)
        elif isinstance(event, Judged):
            counsel.heed(self.job, event, now)
        else:
            self.job.excuse(event.overslept_s, now)
            self._on_tick(now)

    # --- nodes come ------------------------------------------------------------------------------------------------

    def _on_register(self, node: NodeId, message: m.Register, now: float) -> None:
        job = self.job
        if job.counsel.excludes(node) and node not in (*message.places, *job.roster):
            job.turn_away(node)
            return
        if len(job.roster) >= self.limits.nodes_max and node not in job.roster:
            job.record("node_surplus", {"node": node})
        job.roster.enter(message, job.generations.newest)
        job.detector.heard(node, now)
        if message.protected:
            job.protect()
        if job.running and message.size_since != job.size_since:
            job.roster.forget_slots(node, job.current.slots_of(node))
        else:
            job.peers.update(message.peers)
        drain.on_register(job, node, message, now)
        job.history.learn(message.plans)
        if job.running:
            self._welcome(node, message, now)
            return
        self._learn(message, now)
        job.record("node_joined", {"node": node, "role": job.role(node).value if job.membership is not None else ""})
        if self.phase is Phase.FORMING:
            self._form_if_complete(now)
        else:
            self._take_over_if_complete(now)

    def _form_if_complete(self, now: float) -> None:
        count = len(self.job.roster)
        if count >= self.limits.nodes_active and self._complete_at is None:
            self._complete_at = now
        if count >= self.limits.nodes_max and now >= self._form_from:
            self.job.form(now)

    def _learn(self, message: m.Register, now: float) -> None:
        """There was a coordinator before this one: find out how far it had got."""
        job = self.job
        job.generations.used_up(message.generation)
        if message.generation and (job.membership is None or message.generation > job.membership.generation):
            self._recollect(message, now)

    def _recollect(self, message: m.Register, now: float) -> None:
        """Wait for the members of the newest generation that anyone speaks of."""
        self.job.membership = Membership(generation=message.generation, places=message.places, width=self.limits.width)
        self.job.size_since = message.size_since
        if self.phase is not Phase.RECOLLECTING:
            self.job.phase = Phase.RECOLLECTING
            self._recollecting_since = now

    def _take_over_if_complete(self, now: float) -> None:
        job = self.job
        # A later generation that was planned may have trained: it is waited for, though nobody has spoken of it yet. Where no
        # record tells whether there is a later one, all nodes are, for as long as one may be silent.
        newest = job.current.generation <= job.generations.recorded or len(job.roster) >= self.limits.nodes_max
        if newest and not job.superseded and all(member in job.roster for member in job.current.places):
            self._take_over(now)

    def _take_over(self, now: float) -> None:
        """Every member is heard or given up: go on training if nothing happened meanwhile, else recover."""
        job, current = self.job, self.job.current
        members = [job.roster[node] for node in current.places if node in job.roster]
        for node in job.roster:
            if job.roster[node].register.size_since != job.size_since:
                job.roster.forget_slots(node, current.slots_of(node))
        missing: list[Scalar] = [node for node in current.places if node not in job.roster]
        job.record("coordinator_took_over", {"members": len(members), "missing": missing})
        job.wait.taken_over_at = now
        agreed = all(
            (n.register.generation, n.register.places) == (current.generation, current.places) for n in members
        )
        lost = {slot for member in members for slot in member.lost}
        training = agreed and not job.superseded and all(n.register.training for n in members)
        if len(members) < len(current.places) or lost or not training:
            job.recover("the coordinator restarted", now, lost)
            return
        job.started = True
        job.trained_with = current.places
        job.enter(Phase.TRAINING, now)
        for node in job.spares():
            job.send(node, job.fence_message(node))
        for member in current.places:
            self._catch_up(member, now)

    def _catch_up(self, node: NodeId, now: float) -> None:
        """Progress of a member that trains in this generation, from its registration."""
        self._acknowledge(node, self.job.roster[node].register.acked, now)
        self.job.finished.update(self.job.roster[node].finished)
        self._end_if_finished()

    def _welcome(self, node: NodeId, message: m.Register, now: float) -> None:
        """A node that arrives while the job runs."""
        job, current = self.job, self.job.current
        contradicts = message.generation == current.generation and message.places != current.places
        if message.generation > current.generation or contradicts:
            self._overrule(node, message, now)
            return
        job.record("node_joined", {"node": node, "role": job.role(node).value})
        if self.phase is Phase.WAITING:
            job.recover(f"{node} joined", now, job.roster[node].lost if node in current.places else ())
        elif node in current.places:
            self._welcome_back(node, message, now)
        elif self.phase is not Phase.FENCING and job.plan is not None and not job.plan.holders:
            job.recover(f"{node} joined and can hold replicas, which no node did", now)
        else:
            job.send(node, job.fence_message(node))

    def _overrule(self, node: NodeId, message: m.Register, now: float) -> None:
        """An earlier coordinator had announced another membership under a number that is not free any more.

        It may have come to life only if a present member is not connected, as a plan needs the answers of all members. Then
        that one counts, and its members are waited for as if this coordinator had only just begun.
        """
        job = self.job
        job.generations.used_up(message.generation)
        job.record("generation_conflict", {"node": node, "announced": message.generation})
        if message.generation > job.current.generation and any(n not in job.roster for n in job.current.places):
            job.forget()
            self._recollect(message, now)
            self._take_over_if_complete(now)
        else:
            job.recover(f"{node} has accepted generation {message.generation} of an earlier coordinator", now)

    def _welcome_back(self, node: NodeId, message: m.Register, now: float) -> None:
        """A member has a new connection although the old one's end is no news yet: what was said meanwhile is lost."""
        same = message.generation == self.job.current.generation
        lost = self.job.roster[node].lost
        if self.phase in TRAINS and same and message.training and not lost:
            self._catch_up(node, now)
        else:
            self.job.recover(f"{node} lost its connection", now, lost)

    # --- nodes go --------------------------------------------------------------------------------------------------

    def _lose(self, gone: dict[NodeId, str], now: float) -> None:
        """Nodes are no longer there, for the given reasons."""
        job = self.job
        missed = [node for node in gone if self._is_missed(node)]
        for node, reason in gone.items():
            job.drop(node, reason)
        if self.phase is Phase.FORMING and len(job.roster) < self.limits.nodes_active:
            self._complete_at = None
        if missed:
            cause = f"{names_of(missed)} lost: {gone[missed[0]]}"
            if job.protected:
                job.recover(cause, now)
            else:
                job.stop(EXIT_REQUEUE, f"{cause}, before any worker had called hotswap.init()")
        elif self.phase is Phase.FENCING:
            job.try_plan(now)

    def _is_missed(self, node: NodeId) -> bool:
        """Whether training cannot go on without it, or not without risk."""
        job = self.job
        if not job.running:
            return False
        if job.role(node) is Role.ACTIVE:
            return not job.finished.issuperset(job.current.slots_of(node))
        keeps_replicas = any(node in holders for holders in job.plan.holders.values()) if job.plan else False
        return keeps_replicas and self.phase not in (Phase.FENCING, Phase.WAITING)

    # --- workers ---------------------------------------------------------------------------------------------------

    def _on_built(self, node: NodeId, message: m.WorkerBuilt, now: float) -> None:
        job = self.job
        built = job.roster[node].built
        built[message.slot] = message
        job.peers[message.slot] = message.peers
        if job.role(node) is Role.ACTIVE:
            job.built_at = now
            return
        width = self.limits.width
        counts = Counter(slot // width for slot in built)
        if counts[message.slot // width] == width:
            whole: list[Scalar] = [position for position in sorted(counts) if counts[position] == width]
            job.record("spare_ready", {"node": node, "positions": whole})
            counsel.move(job, now)

    def _on_finished(self, node: NodeId, message: m.WorkerFinished, now: float) -> None:
        job = self.job
        if self.phase is Phase.RECOLLECTING:
            job.roster[node].finished.add(message.slot)
            return
        if self.phase in TRAINS or not job.started:
            job.finished.add(message.slot)
            self._end_if_finished()
        elif losses.may_respawn(self.job, message.slot):
            job.recover(f"worker of slot {message.slot} ended while its peers go back", now, {message.slot})
        else:
            job.stop(EXIT_USER_ERROR, f"the worker of slot {message.slot} ends again and again without training")

    def _end_if_finished(self) -> None:
        if self.phase is not Phase.STOPPED and self.job.finished.issuperset(self.job.current.slots):
            self.job.stop(EXIT_OK, "every worker finished")

    def _on_heartbeat(self, node: NodeId, message: m.Heartbeat, now: float) -> None:
        if message.protected:
            self.job.protect()
        if self.phase in TRAINS:
            for slot, progress in message.progress.items():
                self.job.watch.saw(slot, progress, now)
            self._acknowledge(node, message.acked, now)
            slowness.heed(self.job, message.progress, now)

    def _acknowledge(self, node: NodeId, acked: dict[int, int], now: float) -> None:
        job = self.job
        for slot in job.current.slots_of(node):
            if slot in acked:
                job.acked[slot] = max(acked[slot], job.acked.get(slot, 0))
        job.commit(now)

    # --- a recovery ------------------------------------------------------------------------------------------------

    def _on_fenced(self, node: NodeId, message: m.NodeFenced, now: float) -> None:
        if self.phase in PHASE_NAMES:
            self.job.attempt.fenced[node] = message
        if self.phase is Phase.FENCING:
            self.job.try_plan(now)

    def _on_connected(self, node: NodeId, message: m.WorkerConnected, now: float) -> None:
        self.job.attempt.connected.add(message.slot)
        if self.job.attempt.connected.issuperset(self.job.current.slots):
            self.job.enter(Phase.RESTORING, now)

    def _on_ready(self, node: NodeId, message: m.WorkerReady, now: float) -> None:
        self.job.attempt.ready.add(message.slot)
        if self.phase is Phase.RESTORING and self.job.attempt.ready.issuperset(self.job.current.slots):
            self.job.go(now)

    def _on_restore_failed(self, node: NodeId, message: m.RestoreFailed, now: float) -> None:
        self.job.record("restore_failed", {"slot": message.slot, "node": node, "detail": message.detail})
        self.job.restore_failed(message.slot, now, message.detail)

    def _on_shard(self, node: NodeId, message: m.CheckpointShard, now: float) -> None:
        job = self.job
        valid_to = job.history.valid_to(message.generation)
        hosted = message.slot in job.current.slots_of(node) or salvage.awaits(job, message.step)
        if not hosted or (valid_to is not None and message.step > valid_to):
            return  # Not this node's any more, or of a future that was undone while it was written.
        shards = job.shards.add(message.step, message.slot, message.generation, job.current.slots)
        if shards is not None:
            job.send(node, m.CommitCheckpoint(step=message.step, generations=shards))

    def _on_checkpoint_committed(self, node: NodeId, message: m.CheckpointCommitted, now: float) -> None:
        self.job.record("checkpoint_written", {"step": message.step})
        drain.on_checkpoint(self.job, message.step, now)
        salvage.on_checkpoint(self.job, message.step, now)

    def _on_paced(self, node: NodeId, message: m.SnapshotsPaced, now: float) -> None:
        self.job.record("snapshot_interval", {"step": message.step, "interval": message.interval})

    # --- time ------------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> None:
        job = self.job
        silent = job.detector.silent(now)
        if silent:
            waiting.miss(job, silent)
            self._lose(dict.fromkeys(silent, f"silent for {self.limits.detection_budget_s:g} s"), now)
        if job.running and job.trouble is not None and now >= job.trouble[0]:
            job.recover(job.trouble[1], now, probe=True)
        elif self.phase is not Phase.STOPPED and now >= self._phase_deadline():
            self._on_phase_deadline(now)
        elif self.phase in TRAINS:
            standstill.look(job, now)
            if self.phase is Phase.TRAINING:
                drain.on_tick(job, now)
                resize.on_tick(job, now)

    def _phase_deadline(self) -> float:
        if self.phase is Phase.FORMING:
            if self._complete_at is None:
                return self._born_at + self.limits.join_s
            return max(self._form_from, self._complete_at + self.limits.last_call_s)
        if self.phase is Phase.RECOLLECTING:
            return self._recollecting_since + self.limits.detection_budget_s
        return self.job.phase_deadline()

    def _on_phase_deadline(self, now: float) -> None:
        limits, count = self.limits, len(self.job.roster)
        if self.phase is Phase.RECOLLECTING:
            self._take_over(now)
        elif self.phase is Phase.WAITING:
            waiting.end(self.job, now)
        elif self.phase is not Phase.FORMING:
            self._on_laggards(frozenset(self.job.laggards()), now)
        elif self._complete_at is not None:
            self.job.form(now)
        else:
            self.job.stop(EXIT_REQUEUE, f"{count} of {limits.nodes_active} nodes joined within {limits.join_s:g} s")

    def _on_laggards(self, late: frozenset[NodeId], now: float) -> None:
        """Whoever does not answer a fence or cannot build is given up.

        Groups are formed and states restored together, so one node that is stuck makes others late: there nobody is blamed
        for being late once, and never all.
        """
        job = self.job
        reason = f"did not get through '{PHASE_NAMES[self.phase]}' in time"
        alone = self.phase is Phase.FENCING or bool(job.roster.unbuilt(job.current))
        guilty = late if alone else late & job.late
        job.late = late
        if self.phase is not Phase.FENCING and guilty >= set(job.current.places):
            guilty = frozenset()
        if not guilty:
            job.recover(f"{names_of(late)} {reason}", now, probe=True)
            return
        missed = any(self._is_missed(node) for node in guilty)
        for node in sorted(guilty, key=node_order):
            job.evict(node, reason)
        if missed:
            job.recover(f"{names_of(guilty)} {reason}", now)
        else:
            job.try_plan(now)
