"""What really happened, and whether it may. Shares no code with the core: it judges the core.

A state is a step, a history and a loader position. Every collective of an update makes a new history, even if the same
step is done again, as real hardware may give other bits the second time. So slots whose steps or histories differ can
be told apart, and what a step consumed can be read off the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from hotswap.core.survival import survives
from hotswap.core.types import Membership

ROOT = 0
"""The history in which nothing has happened yet."""


class Violation(AssertionError):
    """The protocol has broken a promise."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a slot has: updates done, which ones, and how many samples its loader has given out."""

    step: int
    history: int
    position: int

    def __str__(self) -> str:
        """Short, for transcripts."""
        return f"{self.step}h{self.history}" + ("" if self.position == self.step else f"p{self.position}")


GARBAGE = State(step=-1, history=-1, position=-1)
"""What memory holds while it is written to, and what an aborted collective leaves."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One complete copy of a slot's state in the memory of a node that the coordinator can ask."""

    node: str
    slot: int
    own: bool
    state: State


@dataclass(kw_only=True)
class _Agreed:
    """What all slots were found to hold alike, and where it was then. ``lost``: nodes that have gone since."""

    step: int
    members: Membership
    holders: Mapping[int, tuple[str, ...]]
    lost: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class _Update:
    parent: int
    step: int
    slots: int
    samples: dict[int, int]


@dataclass(kw_only=True)
class Chronicle:
    """Ground truth. ``slots``: of the job as it is now, ``width`` of them on a node; ``strict``: by a log or a store every coordinator knows
    whether the job has trained.

    ``shared``: a replica is not all of a slot's state; the rest has every other slot in its own snapshot.
    """

    slots: int
    strict: bool
    shared: bool = False
    width: int = 1
    memberships: dict[int, tuple[str, ...]] = field(default_factory=dict)
    planned: dict[int, tuple[str, ...]] = field(default_factory=dict)
    committed: tuple[int, int] = (0, ROOT)
    trained: bool = False
    at_risk: set[str] = field(default_factory=set)
    rotten: set[str] = field(default_factory=set)
    """Nodes whose replicas are not what they were."""
    guarded: frozenset[str] = frozenset()
    holders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    odd: frozenset[int] = frozenset()
    """Slots that were found to differ from their peers: what is shared is not taken from them."""
    covered: Membership | None = None
    _agreed: _Agreed | None = None
    _alone: set[int] = field(default_factory=set)
    """Generations of one node for which nobody keeps replicas."""
    _updates: dict[int, _Update] = field(default_factory=dict)
    _stored: dict[tuple[int, int], dict[int, set[str]]] = field(default_factory=dict)

    # --- what happens ----------------------------------------------------------------------------------------------

    def membership(self, generation: int, places: tuple[str, ...]) -> None:
        """A coordinator announces a membership."""
        newest = max(self.memberships if generation not in self.memberships else self.planned, default=0)
        again = generation in self.memberships
        known = self.memberships.setdefault(generation, places)
        if known != places:
            raise Violation(f"two memberships of generation {generation}: {known} and {places}")
        # A number that nobody has heard of is used up, but the generation before goes on.
        # Without a log a coordinator may go on in a generation that others have left. A new one it must not begin there.
        if generation < newest and (self.strict or not again):
            raise Violation(f"generation {generation} is announced after {newest}")

    def meet(self, what: str, where: object, states: Mapping[int, State], slots: int | None = None) -> None:
        """All *slots* of a generation have entered a collective: they must stand at the same step of the same history."""
        if (
            len(states) != (self.slots if slots is None else slots)
            or len({(state.step, state.history) for state in states.values()}) != 1
        ):
            found = ", ".join(f"{slot}:{state}" for slot, state in sorted(states.items()))
            raise Violation(f"mixed states meet in {what} of {where}: {found}")

    def update(self, states: Mapping[int, State], samples: Mapping[int, int]) -> int:
        """The slots compute an update together; the history it makes."""
        history = len(self._updates) + 1
        state = states[0]
        self._updates[history] = _Update(
            parent=state.history, step=state.step, slots=len(states), samples=dict(samples)
        )
        return history

    def gate(self, step: int, history: int, generation: int) -> None:
        """A slot has passed the commit gate of *generation*: everyone relies on this step from now on."""
        if step >= self.committed[0] and not self._left_behind(generation):
            self._commit(step, history)

    def stored(self, slot: int, owner: str, holder: str, state: State) -> None:
        """A replica is complete."""
        if owner == holder:
            raise Violation(f"the replica of slot {slot} lies on {holder}, the node of the slot itself")
        self._stored.setdefault((state.step, state.history), {}).setdefault(slot, set()).add(holder)

    def _left_behind(self, generation: int) -> bool:
        """Whether the job has gone on elsewhere, and no fence could reach a holder of this generation: it may train on, for nobody."""
        return generation in self._alone and generation < max(self.planned)

    def stored_alone(self, slot: int, state: State, generation: int) -> None:
        """A snapshot is complete and there is no other node to keep a replica."""
        if self._left_behind(generation):
            return
        self._stored.setdefault((state.step, state.history), {})[slot] = {""}

    def counted(self, step: int) -> None:
        """The coordinator counts a step as committed."""
        if step <= self.committed[0]:
            complete = [(step, self._ancestor(step))]
        else:
            complete = [
                (at, history) for at, history in self._stored if at == step and self._extends(history, self.committed)
            ]
        complete = [key for key in complete if self._is_stored(self._stored.get(key, {}))]
        if complete and step > self.committed[0]:
            self._commit(*complete[-1])
        if not complete:
            raise Violation(f"step {step} counts as committed but not every slot's replica of it was complete")

    def _is_stored(self, found: Mapping[int, set[str]]) -> bool:
        """By all holders of every slot; a replica that was made in an earlier generation counts as well."""
        return all(slot in found and found[slot].issuperset(self.holders.get(slot, ())) for slot in range(self.slots))

    def _commit(self, step: int, history: int) -> None:
        if not self._extends(history, self.committed):
            raise Violation(f"committed step {self.committed} is not part of the history that goes on: {step, history}")
        self.committed = (step, history)

    def begin_anew(self) -> None:
        """Nobody is left who knows of the job, and no log tells of it: what begins now is another one with its name."""
        assert not self.strict, "a log tells of the job"
        self.memberships.clear()
        self.planned.clear()
        self._stored.clear()
        self._alone.clear()
        self.committed, self.trained, self.covered, self._agreed = (0, ROOT), False, None, None

    def plan(
        self,
        generation: int,
        places: tuple[str, ...],
        resume_step: int,
        copies: Iterable[Copy],
        *,
        fresh: bool,
        durable: State | None = None,
        distrusted_after: int | None = None,
        told_to_distrust_after: int | None = None,
        storage_failed: bool = False,
    ) -> None:
        """The coordinator decides where to go on: never before a committed step that can still be had.

        *fresh*: from the very beginning, which a job that has trained must not do unasked. *durable*: from a checkpoint of
        that state, which may belong to a future that was undone: it is whole, and nothing else is left.
        *distrusted_after*: a comparison of states has failed; what is newer must not be used, whoever has it.
        *told_to_distrust_after*: a coordinator that is gone has recorded that, and a plan that nobody may have got.
        *storage_failed*: what was in memory may not have got there before the job changed its size.
        """
        if distrusted_after is not None and resume_step > distrusted_after:
            raise Violation(f"all agreed at step {distrusted_after} last, yet the job goes on from {resume_step}")
        if distrusted_after is not None:
            self.distrust(resume_step)
        if distrusted_after is not None or resume_step == told_to_distrust_after:
            step = max(0, min(self.committed[0], resume_step))
            self.committed = (step, self._ancestor(step))
        if fresh and self.trained and self.strict:
            raise Violation(f"generation {generation} silently begins from nothing after {self.committed}")
        known = self.planned.setdefault(generation, places)
        if known != places:
            raise Violation(f"two memberships of generation {generation} come to life: {known} and {places}")
        if len(places) * self.width != self.slots:
            self._resize(len(places) * self.width, resume_step, places, storage_failed=storage_failed)
        else:
            self.resume(resume_step, places, copies)
        # What was beyond has been undone; the same steps will be done again.
        self._stored = {key: slots for key, slots in self._stored.items() if key[0] <= resume_step}
        if durable is not None:
            self.committed = (durable.step, durable.history)

    def agree(self, step: int) -> None:
        """All slots hold the same at *step*, each of them in two places at least."""
        self._agreed = None if self.covered is None else _Agreed(step=step, members=self.covered, holders=self.holders)

    def distrust(self, step: int) -> None:
        """Going back to *step* (-1: not at all) because states differ is allowed only if what all agreed on last is lost."""
        agreed = self._agreed
        if agreed is None or step >= agreed.step:
            return
        lost = agreed.lost | self.rotten
        sound = [slot for slot in agreed.members.slots if slot not in self.odd]
        if self.shared and all(agreed.members.node_of(slot) in lost for slot in sound):
            return
        if survives(agreed.members, agreed.holders, lost, shared=self.shared):
            raise Violation(
                f"all agreed at step {agreed.step} last, only {sorted(lost)} lost, yet the job goes back to {step}"
            )

    def _resize(self, slots: int, step: int, places: tuple[str, ...], *, storage_failed: bool) -> None:
        """The job goes on with other slots: what was in memory is gone, but not before it was on storage."""
        if not storage_failed:
            self.resume(step, places, ())
        self.slots, self.covered, self._agreed = slots, None, None
        self._stored.clear()
        if step < self.committed[0]:
            self.committed = (step, self._ancestor(step))

    def resume(self, step: int, places: tuple[str, ...], copies: Iterable[Copy]) -> None:
        """Going on from *step* (-1: not at all) is allowed only if nothing newer was committed or all of it is lost."""
        if step >= self.committed[0]:
            return
        if step < 0 and not self.strict:
            return  # without a log a new coordinator does not know what was undone; rather than trust it, it may stop
        if self.covered and survives(self.covered, self.holders, self.at_risk | self.rotten, shared=self.shared):
            lost = sorted(self.at_risk | self.rotten)
            raise Violation(f"step {self.committed} was committed, only {lost} lost, yet the job goes back to {step}")
        if self._restorable(places, copies):
            raise Violation(f"step {self.committed} was committed and every slot's copy is there, not just of {step}")
        if step < 0:
            return
        self.committed = (step, self._ancestor(step))

    def _restorable(self, places: tuple[str, ...], copies: Iterable[Copy]) -> bool:
        whole = {True: set[int](), False: set[int]()}
        for copy in copies:
            mine = places[copy.slot // self.width] == copy.node
            if (copy.state.step, copy.state.history) == self.committed and (mine or not copy.own):
                whole[copy.own].add(copy.slot)
        if self.shared and not whole[True]:
            return False
        return len(whole[True] | whole[False]) == self.slots

    def go(self, states: Mapping[int, State], places: tuple[str, ...], holders: Mapping[int, tuple[str, ...]]) -> None:
        """A generation is told to train: all slots stand at one step, which continues what was committed.

        *holders*: nodes that keep the slots' replicas; what they and the owners do not lose together must not be lost.
        """
        self.meet("go", f"generation {max(self.planned)}", states)
        state = states[0]
        positions = {other.position for other in states.values()}
        if positions != {state.step}:
            raise Violation(f"step {state.step} begins with loaders at {sorted(positions)}")
        if not self._extends(state.history, self.committed):
            raise Violation(f"training goes on from {state}, which is not a continuation of {self.committed}")
        members = Membership(generation=max(self.planned), places=places, width=self.width)
        self.guarded = frozenset({*places, *chain.from_iterable(holders.values())})
        self.holders, self.covered = holders, members if len(holders) == len(states) else None
        if self._agreed is not None and state.step <= self._agreed.step:
            self.agree(state.step)
        if len(places) == 1 and not holders:
            self._alone.add(members.generation)
        self.at_risk.clear()

    def lost(self, node: str) -> None:
        """A node has gone, or was cut off for long enough to be given up."""
        self.at_risk.add(node)
        if self._agreed is not None:
            self._agreed.lost.add(node)

    @property
    def needed(self) -> frozenset[str]:
        """Nodes that have what could be needed, as members or holders, now or when all agreed last."""
        agreed = self._agreed
        found = () if agreed is None else (*agreed.members.places, *chain.from_iterable(agreed.holders.values()))
        return self.guarded.union(found)

    def finish(self, steps: int) -> None:
        """Every script has ended: all steps were done, each with its own samples, in one history."""
        step, history = self.committed
        if step != steps:
            raise Violation(f"the job ended well after step {step} of {steps}")
        while history != ROOT:
            update = self._updates[history]
            wrong = {slot: sample for slot, sample in update.samples.items() if sample != update.step}
            if wrong or len(update.samples) != update.slots:
                raise Violation(f"step {update.step} of the surviving history used the samples {update.samples}")
            step -= 1
            if update.step != step:
                raise Violation(f"step {update.step} follows on step {step} in the surviving history")
            history = update.parent

    # --- histories -------------------------------------------------------------------------------------------------

    def _ancestor(self, step: int) -> int:
        """The history that the committed one had at *step*."""
        at, history = self.committed
        while at > step:
            history = self._updates[history].parent
            at -= 1
        return history

    def _extends(self, history: int, older: tuple[int, int]) -> bool:
        """Whether *history* is that of *older* or follows from it."""
        while history != ROOT and history != older[1] and self._updates[history].step >= older[0]:
            history = self._updates[history].parent
        return history == older[1]
