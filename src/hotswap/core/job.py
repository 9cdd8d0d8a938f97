"""A job as the coordinator sees it, and the actions of a recovery: fence, plan, go, give a node up, stop.

``coordinator.py`` decides when to do what; here is how. All that is done goes to ``out`` as effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

from hotswap.core import counsel, ladder, placement, plans, resume, salvage, waiting
from hotswap.core import messages as m
from hotswap.core.counsel import Counsel
from hotswap.core.detector import SilenceDetector
from hotswap.core.events import Disconnect, Effect, Exit, Fields, Record, Scalar, Send
from hotswap.core.generations import Generations
from hotswap.core.hang import HangWatch
from hotswap.core.history import History
from hotswap.core.integrity import Offenders
from hotswap.core.limits import LINK_FLOOR, Limits
from hotswap.core.past import Past
from hotswap.core.recovery import PHASE_NAMES, Halt, Recovery
from hotswap.core.roster import Roster
from hotswap.core.shards import Shards
from hotswap.core.tempo import SlowWatch
from hotswap.core.transitions import RUNNING, TRAINS, Phase
from hotswap.core.types import Generation, Membership, NodeId, Role, Slot, SourceKind, Step, Suspicion, host_of
from hotswap.core.waiting import Waiting
from hotswap.errors import EXIT_OK, EXIT_REQUEUE

FAILURES_MAX = 2
"""So often a source may fail to give a slot's state before another one is chosen, if need be of an older step."""
_FROM_MEMBERS = frozenset({SourceKind.LIVE, SourceKind.OWN})
NO_STATE_LEFT = (
    "a slot's owner and all holders of its replica are gone and there is no durable checkpoint; "
    "a new run starts from the beginning (set --checkpoint-dir to bound such a loss)"
)


class Job:
    """State and actions. ``committed`` is the newest step known to be restorable everywhere."""

    def __init__(self, limits: Limits, past: Past) -> None:
        """What is known of the *past* will not be contradicted."""
        self.limits = limits
        self.phase = Phase.FORMING
        self.membership: Membership | None = None
        self.generations = Generations(past)
        self.counsel = Counsel(dict(past.excluded), dict(past.avoided))
        self.roster = Roster(limits.width, self.counsel)
        self.detector = SilenceDetector(limits.detection_budget_s)
        self.watch = HangWatch(limits)
        self.offenders = Offenders()
        self.suspicion: Suspicion | None = None
        self.slow = SlowWatch(limits)
        self.history = History(past.plans)
        self.shards = Shards()
        self.recovery: Recovery | None = None
        self.started = past.started
        self.protected = False
        self.acked: dict[Slot, Step] = {}
        self.committed: Step | None = None
        self.finished: set[Slot] = set()
        self.peers: dict[Slot, tuple[Slot, ...]] = {}
        self.plan: m.Plan | None = None
        self.trained_with: tuple[NodeId, ...] = ()
        self.failures: Counter[tuple[Slot, Step, NodeId]] = Counter()
        self.recoveries = 0
        self.respawns: dict[Slot, int] = {}
        self.raised: dict[Slot, str] = {}
        self.late: frozenset[NodeId] = frozenset()
        self.trouble: tuple[float, str] | None = None
        self.wait = Waiting()
        self.halt: Halt | None = None
        self.rescue: salvage.Rescue | None = None
        self.durable_step: Step = -1
        """Newest durable checkpoint that was committed in this coordinator's time."""
        self.size_since: Generation = 0
        """The generation in which the job got its present number of slots; 0: it never had another one."""
        self.grow_from = float("-inf")
        self.built_at = 0.0
        self.out: list[Effect] = []

    @property
    def current(self) -> Membership:
        """The newest membership, where there must be one."""
        assert self.membership is not None, f"no membership while {self.phase.value}"
        return self.membership

    @property
    def attempt(self) -> Recovery:
        """The recovery under way, where there must be one."""
        assert self.recovery is not None, f"no recovery while {self.phase.value}"
        return self.recovery

    @property
    def hears_nodes(self) -> bool:
        """Whether there was a coordinator before this one, and nodes that it knew may not have been heard yet."""
        return self.phase is Phase.RECOLLECTING or (self.phase is Phase.FORMING and self.generations.recorded > 0)

    @property
    def superseded(self) -> bool:
        """Whether the log tells of a later generation than the one that is known: it was planned and may have trained."""
        return self.current.generation < self.generations.planned

    def forget(self) -> None:
        """What was believed of the present generation is worth nothing: another coordinator has gone on elsewhere."""
        self.recovery = self.plan = self.committed = self.trouble = self.wait.since = self.suspicion = None
        self.acked, self.finished = {}, set()

    def role(self, node: NodeId) -> Role:
        """Member or not."""
        return self.roster.role(node, self.membership)

    def spares(self) -> list[NodeId]:
        """Connected nodes without a place that are there to stay."""
        return self.roster.spares(self.membership)

    def needs(self, node: NodeId) -> bool:
        """Whether *node* has a place or keeps replicas. Without a plan nobody knows who does; a lone member's are with a spare."""
        places = self.current.places
        keeps = len(places) == 1 if self.plan is None else node in chain.from_iterable(self.plan.holders.values())
        return node in places or keeps

    # --- effects ---------------------------------------------------------------------------------------------------

    def send(self, node: NodeId, message: m.ToAgent) -> None:
        """Tell the agent of *node*."""
        self.out.append(Send(node=node, message=message))

    def record(self, event: str, fields: Fields | None = None) -> None:
        """One line for the event log."""
        generation = self.membership.generation if self.membership is not None else 0
        self.out.append(Record(event=event, fields={"generation": generation, **(fields or {})}))

    def enter(self, phase: Phase, now: float) -> None:
        """Change the phase; the event log tells the phases of a recovery."""
        self.leave(now)
        if phase in TRAINS and self.phase not in TRAINS:
            self.watch.begin(now)
        self.phase = phase
        if phase in PHASE_NAMES:
            self.record("phase_started", {"phase": PHASE_NAMES[phase]})

    def leave(self, now: float) -> None:
        """Note the end of a recovery's phase, if the job is in one."""
        if self.recovery is not None and self.phase in PHASE_NAMES:
            name, elapsed_ms = PHASE_NAMES[self.phase], self.recovery.close(self.phase, now)
            self.record("phase_ended", {"phase": name, "ms": elapsed_ms})

    # --- fence -----------------------------------------------------------------------------------------------------

    def form(self, now: float) -> None:
        """The first membership."""
        # Who is to leave comes last; it is drained once the job trains.
        order = sorted(self.roster, key=lambda node: node in self.roster.leaving)
        places = tuple(order[: self.limits.nodes_active])
        self.membership = Membership(generation=self.generations.next(), places=places, width=self.limits.width)
        self.record("job_started", {"nodes": [*order], "width": self.limits.width})
        self.fence(frozenset(self.membership.slots), "start", now)

    def recover(self, cause: str, now: float, lost: Collection[Slot] = (), *, probe: bool = False) -> None:
        """Fence the generation and begin the next one, with spares in the places of lost nodes.

        *probe*: as nothing is known to be lost, ask who reaches whom.
        """
        if self.phase not in (Phase.FENCING, Phase.WAITING, Phase.RECOLLECTING):
            self.recoveries += 1
        if not ladder.IN_PLACE.has_room(self.limits, self.recoveries):
            count = self.limits.recoveries_max
            self.stop(
                ladder.NO_PROGRESS.code, f"{count} recoveries without a newly committed step; the next cause: {cause}"
            )
            return
        dead = [position for position, node in enumerate(self.current.places) if node not in self.roster]
        hurt = self._hurt(lost, dead)
        leaving = {position for position, node in enumerate(self.current.places) if node in self.roster.leaving}
        overdue = sorted(position for position in leaving if self.current.places[position] in self.roster.overdue(now))
        fills = self.roster.fill(
            self.current, dead=dead, broken=self.broken(), hurt=sorted(leaving.union(hurt)), overdue=overdue
        )
        moving = {slot for position in fills for slot in self.current.slots_at(position)}
        unheld = self._new_processes({*lost, *self.finished}) | moving
        self.leave(now)
        self._replace(fills)
        self.fence(unheld, cause, now, probe=probe)
        if missing := [position for position in dead if position not in fills]:
            waiting.for_nodes(self, len(missing), now)

    def broken(self) -> list[int]:
        """Positions whose node is there, but must not go on."""
        places = enumerate(self.current.places)
        return [position for position, node in places if node in self.roster and self.counsel.excludes(node)]

    def _hurt(self, lost: Collection[Slot], dead: Sequence[int]) -> list[int]:
        """Positions whose node is there but has lost workers, if a spare is to go before it."""
        hurt = {slot // self.limits.width for slot in lost}.difference(dead)
        places = self.current.places
        return sorted(p for p in hurt if self.limits.spare_first or self.counsel.avoids(places[p]))

    def _new_processes(self, lost: set[Slot]) -> frozenset[Slot]:
        """Slots whose process is new, those included that were new in a generation that never came to life."""
        for slot in lost:
            node = self.current.node_of(slot)
            if node in self.roster:
                self.roster[node].built.pop(slot, None)
        if self.recovery is not None and self.phase in PHASE_NAMES:
            return frozenset(lost | (self.recovery.lost - self.recovery.ready))
        return frozenset(lost)

    def _replace(self, fills: dict[int, NodeId]) -> None:
        before = self.current
        self.membership = before.replace(fills, self.generations.next())
        for position, node in fills.items():
            self.roster.promote(node)
            hot = self.roster.has_built(node, before.slots_at(position)) == before.width
            fields: Fields = {"node": node, "replaces": before.places[position], "position": position, "hot": hot}
            self.record("spare_promoted", fields)

    def fence(self, lost: frozenset[Slot], cause: str, now: float, *, probe: bool = False) -> None:
        """Announce the newest membership: everything older is void from here on."""
        self.raised.clear()
        previous = self.recovery if self.phase in PHASE_NAMES else None
        self.recovery = Recovery(cause=cause, started_at=now, phase_at=now, lost=lost, probe=probe)
        if previous is not None:
            self.recovery.started_at, self.recovery.phases_ms = previous.started_at, previous.phases_ms
        self.trouble = self.halt = self.rescue = None
        self.finished.clear()
        self.phase = Phase.FENCING
        self.record("recovery_started", {"cause": cause, "lost": [*sorted(lost)], "places": [*self.current.places]})
        self.record("phase_started", {"phase": PHASE_NAMES[Phase.FENCING]})
        for node in self.roster:
            self.send(node, self.fence_message(node))

    def fence_message(self, node: NodeId) -> m.Fence:
        """The newest membership, as *node* has to know it."""
        return m.Fence(
            generation=self.current.generation,
            places=self.current.places,
            endpoints=self.roster.endpoints,
            lost=tuple(sorted(self.recovery.lost)) if self.recovery is not None else (),
            positions=self.roster.positions(node, self.current) if self.protected else (),
            size_since=self.size_since,
            valid_to=self.history.valid_to(self.roster[node].knows),
            plans=self.history.plans,
            probe=self.recovery is not None and self.recovery.probe,
        )

    # --- plan ------------------------------------------------------------------------------------------------------

    def awaited(self) -> list[NodeId]:
        """Members and keepers of replicas that have not answered the fence."""
        keepers = self.roster if self.plan is None else chain.from_iterable(self.plan.holders.values())
        needed = {*self.current.places, *keepers}
        return [node for node in self.unfenced() if node in needed]

    def unfenced(self) -> list[NodeId]:
        """All connected nodes that have not answered the fence."""
        return [node for node in self.roster if node not in self.attempt.fenced]

    def try_plan(self, now: float) -> None:
        """Plan once the answers suffice. Before anything is given up as lost, everyone is heard."""
        if any(node not in self.attempt.fenced for node in self.current.places):
            return
        if self.attempt.probe and (self.unfenced() or self._part_with_cut_off(now)):
            return
        ledger = self.attempt.ledger(self.current, self.peers, self.suspicion)
        self.started = self.started or ledger.trained()
        for (slot, step, node), count in self.failures.items():
            if count >= FAILURES_MAX:
                ledger.distrust(slot, step, node)
        choice = resume.choose(self.current.slots, ledger)
        # Own snapshots include every committed step, if their nodes have been members for as long as the job trained last. What
        # a node holds that has come back to its old place may be long past, and only a keeper have what is newer.
        stayed = self.current.places == self.trained_with
        complete = stayed and choice is not None and all(s.kind in _FROM_MEMBERS for s in choice.sources.values())
        # What all agreed on last may be where slots were before, on any node.
        short = choice is None or (ledger.suspicion is not None and choice.step < ledger.suspicion.verified)
        if (self.awaited() and not complete) or (short and self.unfenced()):
            return
        if choice is None and any(node not in self.roster for node in self.wait.cut_off):
            # Cut off, maybe together with everybody; gone only if nothing is heard of them for as long as for any node.
            waiting.for_nodes(self, len(self.wait.cut_off), now)
            return
        if choice is None and now < self.wait.taken_over_at + self.limits.detection_budget_s:
            # Nodes without a place may have what is missing, and find this coordinator a moment later than the members.
            waiting.for_latecomers(self, now)
            return
        choice = choice or self._without_memory(self.attempt)
        if choice is None:
            # Better to ask again who has failed twice than nobody. How often is bounded as for all recoveries.
            ledger = self.attempt.ledger(self.current, self.peers, self.suspicion)
            choice = resume.choose(self.current.slots, ledger)
        if choice is None:
            self.stop(EXIT_REQUEUE, NO_STATE_LEFT)
            return
        self._announce(self.attempt, ledger, choice)
        self.enter(Phase.REBUILDING, now)

    def _part_with_cut_off(self, now: float) -> bool:
        """Give up nodes that others cannot reach, so that all that are left reach each other; whether a member is among them."""
        unreachable = self.attempt.unreachable()
        outcasts = placement.outcasts(unreachable, self.current.places)
        for node in outcasts:
            peers = [peer for peer in self.roster if node in unreachable[peer] or peer in unreachable[node]]
            self.evict(node, f"cut off from {', '.join(peers)}")
            unreachable.pop(node)
        cut_off = [node for node in outcasts if node in self.current.places]
        if cut_off:
            self.recover(f"{', '.join(cut_off)} cannot be reached by other nodes", now)
        return bool(cut_off)

    def _without_memory(self, recovery: Recovery) -> resume.Resume | None:
        """The newest durable checkpoint; the very beginning if the job never got anywhere."""
        step = recovery.checkpoint_step()
        if step is not None:
            self.record("restored_from_checkpoint", {"step": step, "first_start": not self.started})
            return plans.everywhere(self.current.slots, step, SourceKind.CHECKPOINT)
        return None if self.started else plans.everywhere(self.current.slots, 0, SourceKind.FRESH)

    def _announce(self, recovery: Recovery, ledger: resume.Ledger, choice: resume.Resume) -> None:
        suspicion, self.suspicion = ledger.suspicion, None
        if suspicion is not None:
            self.record("steps_distrusted", {"verified": suspicion.verified, "odd": [*suspicion.odd]})
        recovery.resume_step = choice.step
        recovery.redone = resume.redone_steps(ledger.live, choice.step)
        recovery.moved_nbytes = 2 * ledger.largest_nbytes()
        holders = placement.holders(self.current, self.roster.domains, self.spares(), self.limits.replicas)
        keep = recovery.keep(self.current) if self.limits.keep_groups else frozenset[str]()
        plan = self.plan = plans.plan_of(self.current.generation, choice, ledger, holders, keep)
        self._go_back_to(choice.step)
        sources: dict[str, Scalar] = {str(slot): source.kind.value for slot, source in choice.sources.items()}
        self.record(
            "recovery_planned",
            {"resume_step": choice.step, "sources": sources, "keep": len(plan.keep), "push": len(plan.push)},
        )
        for node in self.roster:
            self.roster[node].knows = plan.generation
            self.send(node, plan)

    def restore_failed(self, slot: Slot, now: float, detail: str) -> None:
        """A planned source did not serve. It may once for no fault of its own; after that it is not asked again."""
        assert self.plan is not None, "restoring without a plan"
        node = self.plan.sources[slot].unique_from or self.current.node_of(slot)
        self.failures[slot, self.plan.resume_step, node] += 1
        self.recover(f"slot {slot} could not be restored: {detail}", now, probe=True)

    def _go_back_to(self, step: Step) -> None:
        if self.committed is not None and step < self.committed:
            self.record("committed_steps_lost", {"committed": self.committed, "resume_step": step})
        self.committed = step
        self.acked = {}
        self.wait.since = None
        self.history.planned(self.current.generation, step)
        self.shards.undo_after(step)
        if self.durable_step > step:
            self.durable_step = -1  # That one is of an undone future, or does not count any more.

    def protect(self) -> None:
        """The script turns out to use hotswap: it can be recovered, and spares may run it as well."""
        if not self.protected:
            self.protected = True
            for node in self.spares() if self.running else ():
                self.send(node, self.fence_message(node))

    # --- go --------------------------------------------------------------------------------------------------------

    def go(self, now: float) -> None:
        """Every slot is at the resume step, and so is its replica: train."""
        step = self.attempt.resume_step
        self.acked = dict.fromkeys(self.current.slots, step)
        self.started = True
        self.wait.cut_off.clear()
        self.failures.clear()  # what could not be read does not count as held, and was sent anew
        self.trained_with = self.current.places
        self.record("training_started", {"step": step})
        self.enter(Phase.REDOING, now)
        for node in self.roster:
            self.send(node, m.Go(generation=self.current.generation))
        counsel.part(self)

    def commit(self, now: float) -> None:
        """Count a step as committed once every slot's snapshot of it is acknowledged."""
        if any(slot not in self.acked for slot in self.current.slots):
            return
        step = min(self.acked[slot] for slot in self.current.slots)
        if self.committed is not None and step <= self.committed:
            return
        self.committed = step
        self.watch.committed(step, now)
        self.recoveries = 0
        self.respawns.clear()
        self.failures.clear()
        self.counsel.hopeless.clear()
        self.late = frozenset()
        self.record("step_committed", {"step": step})
        if self.phase is Phase.REDOING:
            self.enter(Phase.TRAINING, now)
            self.record("recovery_done", self.attempt.summary(now))

    # --- ends ------------------------------------------------------------------------------------------------------

    def drop(self, node: NodeId, reason: str) -> None:
        """A node is no longer there."""
        self.record("node_lost", {"node": node, "role": self.role(node).value, "reason": reason})
        self._forget(node)

    def _forget(self, node: NodeId) -> None:
        self.roster.drop(node)
        self.detector.forget(node)
        if self.recovery is not None:
            # What it has said it holds cannot be had any more.
            self.recovery.fenced.pop(node, None)

    def evict(self, node: NodeId, reason: str) -> None:
        """Give up a node that is still connected: it gets nothing more to do in this job."""
        self.send(node, m.Stop(exit_code=EXIT_REQUEUE, reason=reason))
        self.out.append(Disconnect(node=node, reason=reason))
        self.drop(node, reason)

    def release(self, node: NodeId, reason: str) -> None:
        """Let a node go that was to leave."""
        self.send(node, m.Stop(exit_code=EXIT_OK, reason=reason))
        self.out.append(Disconnect(node=node, reason=reason))
        self.record("node_drained", {"node": node, "role": self.role(node).value, "reason": reason})
        self._forget(node)

    def turn_away(self, node: NodeId) -> None:
        """End a node that is proven broken and has no place."""
        reason = f"{node} takes no further part: {self.counsel.excluded[host_of(node)]}"
        self.record("node_turned_away", {"node": node, "reason": reason})
        self.send(node, m.Stop(exit_code=EXIT_REQUEUE, reason=reason))
        self.out.append(Disconnect(node=node, reason=reason))

    def stop(self, exit_code: int, reason: str) -> None:
        """End the job."""
        self.phase = Phase.STOPPED
        self.record("job_stopped", {"exit_code": exit_code, "reason": reason})
        for node in self.roster:
            self.send(node, m.Stop(exit_code=exit_code, reason=reason))
        self.out.append(Exit(exit_code=exit_code, reason=reason))

    def excuse(self, seconds: float, now: float) -> None:
        """This coordinator did not run for so long."""
        self.detector.excuse(seconds, now)
        self.watch.excuse(seconds, now)

    # --- deadlines -------------------------------------------------------------------------------------------------

    def laggards(self) -> list[NodeId]:
        """Nodes that the phase still waits for."""
        if self.phase is Phase.FENCING:
            return self.awaited() or self.unfenced()
        if self.phase is Phase.REBUILDING and (unbuilt := self.roster.unbuilt(self.current)):
            return unbuilt
        done = self.attempt.connected if self.phase is Phase.REBUILDING else self.attempt.ready
        return [node for node in self.current.places if not done.issuperset(self.current.slots_of(node))]

    def phase_deadline(self) -> float:
        """When a recovery's phase has taken too long; training may take as long as it wants."""
        limits = self.limits
        if self.phase is Phase.WAITING:
            return waiting.ends(self)
        if self.phase is Phase.FENCING:
            return self.attempt.phase_at + limits.phase_s
        if self.phase is Phase.REBUILDING and self.roster.unbuilt(self.current):
            return self.attempt.phase_at + limits.build_s if self.protected else float("inf")
        if self.phase is Phase.REBUILDING:
            return max(self.attempt.phase_at, self.built_at) + limits.phase_s
        if self.phase is Phase.RESTORING:
            return self.attempt.phase_at + self._restore_s()
        return float("inf")

    def _restore_s(self) -> float:
        """How much there is to restore is known of what lies in memory. Storage may take as long as building a worker."""
        assert self.plan is not None, "restoring without a plan"
        if any(source.kind is SourceKind.CHECKPOINT for source in self.plan.sources.values()):
            return self.limits.build_s
        return self.limits.phase_s + self.attempt.moved_nbytes / LINK_FLOOR

    @property
    def running(self) -> bool:
        """Whether there is a membership that this coordinator answers for."""
        return self.phase in RUNNING
