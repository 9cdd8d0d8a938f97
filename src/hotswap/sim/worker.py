"""One training process: the step loop with its commit gate, and what it does when its generation ends.

The thread that trains is a generator. It yields how long it is busy (seconds) or what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Union

from hotswap.core import messages as m
from hotswap.core.types import SourceKind, WorkerState
from hotswap.sim.chronicle import GARBAGE, ROOT, State
from hotswap.sim.fabric import Key
from hotswap.sim.world import Pipe, Timer

if TYPE_CHECKING:
    from hotswap.sim.agent import AgentModel

LOCAL_DELAY_S = (0.0001, 0.003)
Yield = Union[float, Callable[[], bool]]
Thread = Generator[Yield, None, None]


class Ended(Exception):
    """The generation has ended; whatever was under way is void."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Agent to worker: go to this state. ``buffer`` below 0: there is none in memory."""

    plan: m.Plan
    source: SourceKind
    buffer: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Said:
    """Worker to agent."""

    what: str
    generation: int
    step: int = 0
    buffer: int = 0
    state: WorkerState | None = None


class WorkerModel:
    """``step``, ``history`` and ``position`` are the live state; the listening thread is ``hear``."""

    def __init__(self, agent: AgentModel, slot: int, number: int) -> None:
        """*number* tells processes of one slot apart."""
        self.agent = agent
        self.world = agent.world
        self.slot = slot
        self.name = f"slot {slot}.{number}"
        self.alive = True
        self.crashed = False
        self.up = Pipe(self.world, LOCAL_DELAY_S, lambda said: agent.hear_worker(self, said))
        self.down = Pipe(self.world, LOCAL_DELAY_S, self.hear)
        self.state = State(step=0, history=ROOT, position=0)
        self.step = 0
        self.dirty = self.torn = False
        self.generation = 0
        self.told = 0
        self.load: Load | None = None
        self.go = 0
        self.acked = -1
        self.free = 0
        self._parked_for = 0
        self._waiting: Callable[[], bool] | None = None
        self._in: Key | None = None
        self._result: int | None = None
        self._broken = False
        self._timer: Timer | None = None
        self._thread = self._life()
        self._timer = self.world.after(self.world.between(*agent.setup.build_s), self._advance)
        # What the agent knows of it.
        self.built = self.unwanted = self.restored = False
        self.loaded = 0
        self.parked: Said | None = None

    # --- the thread ------------------------------------------------------------------------------------------------

    def _advance(self, error: Exception | None = None) -> None:
        """Run the thread until it is busy or waits."""
        self._waiting = None
        try:
            while self.alive:
                wanted = next(self._thread) if error is None else self._thread.throw(error)
                error = None
                if not callable(wanted):
                    self._timer = self.world.after(wanted, self._advance)
                    return
                if not wanted():
                    self._waiting = wanted
                    return
        except StopIteration:
            self.exit(0)

    def poke(self) -> None:
        """Something has changed: see whether the thread can go on."""
        if self.alive and self._waiting is not None and self._waiting():
            self._advance()

    def exit(self, status: int) -> None:
        """End the process. What it has said will still be heard."""
        if not self.alive:
            return
        self.alive = False
        self.crashed = status != 0
        self.down.cut_off = True
        if self._timer is not None:
            self._timer.cancel()
        self.world.note(f"{self.name} ends with {status}")
        if self.crashed:
            self.agent.job.fabric.died(self.generation, self.slot)
        delay = self.up.cut(keep_all=True)
        self.world.after(delay + self.world.between(0.0005, 0.01), self.agent.worker_ended, self, status)

    # --- the listening thread --------------------------------------------------------------------------------------

    def hear(self, message: object) -> None:
        """A message from the agent."""
        if not self.alive:
            return
        if isinstance(message, m.Fence):
            self.told, self.load, self.acked = message.generation, None, -1
            if 0 < self.generation < self.told:
                self.world.after(self.world.between(0.001, 0.06), self._abort, self.told)
        elif isinstance(message, Load):
            self.load, self.free = message, message.free
        elif isinstance(message, m.Go):
            self.go = message.generation
        elif isinstance(message, tuple) and message[0] == self.told:
            # A snapshot may be pushed twice, and the second acknowledgement of an old one come last.
            self.acked, self.free = max(self.acked, message[1]), message[2]
        self.poke()

    def _abort(self, told: int) -> None:
        """Shut the connections: whoever waits in a collective falls out of it, maybe with rubbish instead of an error."""
        if self.alive and self._in is not None and self.generation < told:
            if self.world.chance(0.2):
                self._result = GARBAGE.history
                self.poke()
            elif self._waiting is not None:
                self._in = None
                self._advance(Ended())

    # --- collectives -----------------------------------------------------------------------------------------------

    def _collective(self, name: str, sample: int = 0) -> Thread:
        key = (self.generation, name, 0 if name == "connect" else self.step)
        self._in, self._result, self._broken = key, None, False
        self.agent.job.fabric.enter(key, self, self.state, sample)
        yield lambda: self._result is not None or self._broken
        self._in = None
        if self._broken:
            self.say("trouble")
            yield lambda: self.told > self.generation
            raise Ended

    def complete(self, key: Key, history: int) -> None:
        """The collective is through."""
        if self._in == key and self._result is None:
            self._result = history
            self.poke()

    def break_off(self, key: Key) -> None:
        """A connection broke in the collective."""
        if self._in == key and self._result is None:
            self._broken = True
            self.poke()

    # --- what the process does -------------------------------------------------------------------------------------

    def say(self, what: str, step: int = 0, buffer: int = 0, state: WorkerState | None = None) -> None:
        """Tell the agent."""
        generation = self.told if what == "parked" else self.generation
        self.up.send(Said(what=what, generation=generation, step=step, buffer=buffer, state=state))

    def _check(self) -> None:
        if self.told > self.generation:
            raise Ended

    def _life(self) -> Thread:
        setup = self.agent.setup
        self.say("built")
        running = False
        while True:
            try:
                if not running:
                    yield from self._recover()
                    running = True
                if self.step >= setup.steps:
                    yield from self._wait_acked()
                    yield from self._collective("last gate")
                    yield self.world.between(0.0, 0.3)
                    return
                yield from self._attempt()
            except Ended:
                running = False

    def _attempt(self) -> Thread:
        """One step, as ``hotswap.session`` does it."""
        setup, world = self.agent.setup, self.world
        self.dirty = True
        sample = self.state.position
        self.state = replace(self.state, position=sample + 1)
        yield world.between(*setup.compute_s)
        self._check()
        yield from self._collective("gradients", sample)
        history = self._result
        assert history is not None, "a collective that is through has a result"
        self._check()
        if setup.gate:
            yield from self._wait_acked()
            yield from self._collective("gate")
        self._check()
        self.torn = True
        self.agent.job.moment("update")
        yield world.between(*setup.update_s)
        yield from self._collective("parameters")
        self._check()
        following = State(step=self.step + 1, history=history, position=sample + 1)
        buffer = yield from self._write(following)
        # A snapshot becomes valid, or an abort begins: never both.
        self._check()
        self.state, self.step = following, following.step
        self.dirty = self.torn = False
        self.say("snapshot", step=self.step, buffer=buffer)

    def _wait_acked(self) -> Thread:
        yield lambda: self.acked >= self.step or self.told > self.generation
        self._check()

    def _write(self, state: State) -> Generator[Yield, None, int]:
        index = self.free
        buffer = self.agent.memory.granted(self.slot)[index]
        self.say("begin", buffer=index)
        buffer.content = GARBAGE
        self.agent.job.moment("snapshot")
        yield self.world.between(*self.agent.setup.copy_s)
        buffer.content = state
        return index

    def _recover(self) -> Thread:
        while True:
            told = self.told
            # A process that was told of a plan while it was built, and then of a newer fence, has nothing to leave.
            if told > self._parked_for and self.generation:
                yield self.world.between(0.0001, 0.01)
                if self.told != told:
                    continue
                self._parked_for = told
                state = WorkerState(slot=self.slot, step=self.step, dirty=self.dirty, torn=self.torn)
                self.say("parked", state=state)
            yield lambda told=told: self.load is not None or self.told > told  # type: ignore[misc]
            if self.load is None or self.load.plan.generation != self.told:
                continue
            try:
                yield from self._apply(self.load)
                return
            except Ended:
                continue

    def _apply(self, load: Load) -> Thread:
        plan = load.plan
        self.generation = plan.generation
        yield from self._collective("connect")
        self._check()
        self.say("connected")
        yield from self._restore(load)
        yield from self._collective("materialise")
        self._check()
        self.torn = self.dirty = False
        if load.buffer < 0:
            buffer = yield from self._write(self.state)
            self._check()
            self.say("snapshot", step=self.step, buffer=buffer)
        self.say("restored", step=self.step)
        yield lambda: self.go == self.generation or self.told > self.generation
        self._check()

    def _restore(self, load: Load) -> Thread:
        self.torn = self.torn or load.source not in (SourceKind.LIVE, SourceKind.FRESH)
        yield self.world.between(*self.agent.setup.restore_s)
        if load.source is SourceKind.CHECKPOINT:
            self.state = self.agent.job.checkpoint(self.slot, load.plan.resume_step)
        elif load.source is SourceKind.FRESH:
            self.state = State(step=0, history=ROOT, position=0)
        elif load.buffer >= 0:
            self._read(self.agent.memory.granted(self.slot)[load.buffer].content, load.source)
        self.step = load.plan.resume_step

    def _read(self, content: State, source: SourceKind) -> None:
        """A live worker has the tensors; only what moves during an attempt comes from the snapshot."""
        self.state = replace(self.state, position=content.position) if source is SourceKind.LIVE else content
