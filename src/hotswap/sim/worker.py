"""One training process: what ``session/session.py`` does with its threads and torch, as a generator in virtual time.

This is a model: the step loop with its commit gate, snapshots, and what happens when a generation ends. The mailbox, the
messages and the memory are production's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from hotswap.core import messages as m
from hotswap.core.types import NodeId, SourceKind
from hotswap.errors import Fenced, IntegrityError, PeerUnreachable
from hotswap.session.boundary import Boundary
from hotswap.session.mailbox import Mailbox
from hotswap.sim.chronicle import GARBAGE, ROOT, State, Violation
from hotswap.sim.comparison import Comparison
from hotswap.sim.execution import Execution, Thread, Yield
from hotswap.sim.fabric import Key
from hotswap.sim.memory import (
    MemoryModel,
    read_generation,
    read_state,
    read_unique,
    snapshot_nbytes,
    spoil,
    write_state,
)
from hotswap.sim.network import Pipe
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel

CODEC = worker_codec()
GROWTH = 1.25


@dataclass(kw_only=True)
class _Gate:
    """A commit gate, in which a worker takes part beside what it does. ``relied``: what has to be acknowledged before."""

    generation: int
    key: Key
    relied: State | None = None
    proposal: int = 1
    begun: bool = False
    held: bool = False
    agreed: int | None = None
    broken: bool = False


class WorkerModel:
    """``state`` and ``step`` are live; ``hear`` is the listening thread, ``execution`` runs the main one."""

    def __init__(
        self,
        job: JobModel,
        node: NodeId,
        slot: int,
        pid: int,
        *,
        slots: int,
        rehearse: bool,
        on_end: Callable[[int], None],
    ) -> None:
        """*slots*: of the whole job. *on_end* gets the exit status."""
        self.job = job
        self.world = job.world
        self.node = node
        self.slot = slot
        self.slots = slots
        self.name = f"slot {slot}.{pid}"
        self.up: Pipe
        self.crashed = False
        self.mailbox = Mailbox(cast(Any, None))
        self.boundary = Boundary(self.mailbox)
        self.files: list[MemoryModel] = []
        self.state = State(step=0, history=ROOT, position=0)
        self.step = 0
        self.kept = self.state
        """The state of the last snapshot."""
        self.dirty = self.torn = False
        self.generation = 0
        self.membership = ""
        self.interval = 1
        self.comparison = Comparison(self)
        self.copying: w.SnapshotDone | None = None
        """A snapshot whose copy off the device is under way; it counts once that is done, or never."""
        self._rehearse = rehearse
        self._on_end = on_end
        self._parked_for = 0
        self._in: Key | None = None
        self._result: int | None = None
        self._broken = False
        self._gate = _Gate(generation=0, key=("", "gate", -1), begun=True)
        self.execution = Execution(self.world, self.name, self._life(), self.exit)

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.execution.alive

    def exit(self, status: int) -> None:
        """End the process. What it has said will still be heard."""
        if not self.alive:
            return
        self.execution.end()
        self.crashed = status != 0
        self.world.note(f"{self.name} ends with {status}")
        if self.crashed:
            self.job.fabric.died(self.membership, self.slot)
        self.up.cut(keep_all=True)
        self._on_end(status)

    # --- the listening thread --------------------------------------------------------------------------------------

    def hear(self, data: bytes, files: list[MemoryModel]) -> None:
        """A message from the agent."""
        if self.execution.postponed(self.hear, data, files):
            return
        message = CODEC.decode(data)
        if isinstance(message, w.Granted):
            self.files = files
        elif isinstance(message, w.Finish):
            self.exit(message.exit_code)
            return
        self.mailbox.put(message)
        self._advance_gate()
        if isinstance(message, m.Fence) and 0 < self.generation < message.generation:
            # Copies behind a device that may take in garbage from now on never count.
            if self.copying is not None and self.world.chance(0.5):
                self.state = GARBAGE
            self.world.after(self.world.between(0.001, 0.06), self._abort, message.generation)
        self.execution.poke()

    def _abort(self, told: int) -> None:
        """Shut the connections: whoever waits in a collective falls out of it, maybe with rubbish instead of an error."""
        if self.execution.postponed(self._abort, told) or self._in is None or self.generation >= told:
            return
        if self.world.chance(0.2):
            self._result = GARBAGE.history
            self.execution.poke()
        elif self.execution.waits:
            self._in = None
            self.execution.advance(Fenced("aborted"))

    # --- collectives -----------------------------------------------------------------------------------------------

    def collective(self, name: str, *, sample: int = 0, relied: State | None = None, proposal: int = 1) -> Thread:
        """Take part in one, and wait for its end; Fenced if the generation is over before."""
        key = (self.membership, name, 0 if name == "connect" else self.step)
        self._in, self._result, self._broken = key, None, False
        self.job.fabric.enter(key, self, self.state, sample=sample, relied=relied, proposal=proposal)
        yield from self._in_collective()

    def _in_collective(self) -> Thread:
        yield lambda: self._result is not None or self._broken
        self._in = None
        if self._broken:
            yield from self._trouble("connection reset by peer")

    def _trouble(self, detail: str) -> Thread:
        """A collective failed: a fence will explain it, or the script fails."""
        self.say(w.Trouble(generation=self.generation, detail=detail))
        end = self.world.now + 10 * self.job.timing.detection_budget_s
        self.world.at(end, self.execution.poke)
        yield lambda: self.fenced() or self.world.now >= end
        self.check()
        raise PeerUnreachable(f"{detail}, and nobody said why")

    def complete(self, key: Key, result: int) -> None:
        """The collective is through."""
        if self._gate.key == key:
            self._gate.agreed = result
        if self._in == key and self._result is None:
            self._result = result
            self.execution.poke()

    def break_off(self, key: Key) -> None:
        """A connection broke in the collective, or its time is up."""
        if self._gate.key == key:
            self._gate.broken = True
        if self._in == key and self._result is None:
            self._broken = True
            self.execution.poke()

    # --- what the process does -------------------------------------------------------------------------------------

    def say(self, message: Any) -> None:
        """Tell the agent."""
        self.up.send(CODEC.encode(message))

    def fenced(self) -> bool:
        """Whether the generation is over."""
        return self.mailbox.fenced(self.generation)

    def check(self) -> None:
        """Fenced if the generation is over."""
        self.mailbox.require(self.generation)

    def _wait(self, condition: Callable[[], object]) -> Thread:
        """As ``Mailbox.wait`` does."""
        yield lambda: condition() or self.fenced()
        self.check()

    @property
    def peers(self) -> tuple[int, ...]:
        """The slots that have the same shared state. What one node has alone nobody shares."""
        setup = self.job.setup
        if not setup.shared or self.slots == setup.width:
            return ()
        return tuple(other for other in range(self.slots) if other != self.slot)

    def _life(self) -> Thread:
        setup = self.job.setup
        yield self.world.between(0.01, 0.1)
        self.say(w.Joined())
        yield self.job.between(setup.build_s)
        if self._rehearse:
            yield self.job.between(setup.build_s)
            shared, unique = snapshot_nbytes(0, shared=bool(self.peers))
            self.say(w.Reserve(nbytes=int((shared + unique) * GROWTH), buffers=2, ahead=True))
        self.say(w.Built(shape="model", peers=self.peers, rehearsed=self._rehearse))
        running = False
        while True:
            try:
                if not running:
                    yield from self._recover()
                    running = True
                if self.step >= setup.steps:
                    yield from self._wait_acked()
                    yield from self.comparison.conclude()
                    yield from self.collective("last gate", relied=self.kept)
                    yield self.world.between(0.0, 0.3)
                    return
                yield from self._attempt()
            except Fenced:
                running = False

    def _attempt(self) -> Thread:
        """One step."""
        setup = self.job.setup
        self.dirty = True
        due = self._due()
        if setup.gate:
            self._arm_gate(due)
        sample = self.state.position
        self.state = replace(self.state, position=sample + 1)
        yield self.job.between(setup.compute_s)
        self.check()
        yield from self.collective("gradients", sample=sample)
        history = self._result
        assert history is not None, "a collective that is through has a result"
        self.check()
        agreed = self.interval
        if setup.gate:
            agreed = yield from self._pass_gate()
        if self.copying is not None:
            yield from self._wait(lambda: self.copying is None)
        self.check()
        self.torn = True
        self.job.moment("update")
        yield self.job.between(setup.update_s)
        yield from self.collective("parameters")
        self.check()
        yield from self._complete(State(step=self.step + 1, history=history, position=sample + 1), due)
        self.interval = agreed
        if self.boundary.halts_at(self.step) and self.step < setup.steps:
            yield from self._stand_still()

    def _arm_gate(self, due: bool) -> None:
        """Take part as soon as the replica is whole, if the next snapshot would overwrite the one before."""
        proposal = self.world.dice.randint(1, 4) if self.job.setup.paced else 1
        proposal = self.boundary.proposal(proposal)
        key = (self.membership, "gate", self.step)
        held = due and self.comparison.under_way
        relied = self.kept if due else None
        self._gate = _Gate(generation=self.generation, key=key, relied=relied, proposal=proposal, held=held)
        self._advance_gate()

    def _advance_gate(self) -> None:
        gate = self._gate
        acked = gate.relied is None or self.mailbox.acked >= gate.relied.step
        if acked and not gate.begun and not gate.held and not self.mailbox.fenced(gate.generation):
            gate.begun = True
            self.job.fabric.enter(gate.key, self, self.state, sample=0, relied=gate.relied, proposal=gate.proposal)

    def _pass_gate(self) -> Generator[Yield, None, int]:
        """Wait for all others, beside whom forward and backward have gone on."""
        gate = self._gate
        if gate.relied is not None:
            yield from self._wait_acked()
            yield from self.comparison.conclude()
        self.comparison.begin()
        gate.held = False
        self._advance_gate()
        self._in, self._result, self._broken = gate.key, gate.agreed, gate.broken and gate.agreed is None
        yield from self._in_collective()
        self.check()
        assert self._result is not None, "a gate that is passed says how far snapshots are apart"
        return self.boundary.agree(self._result, self.step, self.interval)

    def _due(self) -> bool:
        following = self.step + 1
        last = following == self.job.setup.steps or self.boundary.halts_at(following)
        return following - self.kept.step >= self.interval or self.durable(following) or last

    def durable(self, step: int) -> bool:
        """Whether the snapshot of *step* is to be on storage as well."""
        every = self.job.setup.durable_steps
        asked = self.boundary.durable and self.boundary.halts_at(step)
        return every > 0 and (step % every == 0 or step == self.job.setup.steps or asked)

    def _stand_still(self) -> Thread:
        """As ``Boundary.stand_still`` does."""
        self.boundary.arrive()
        yield from self._wait_acked()
        self.say(w.Halted(generation=self.generation, step=self.step))
        self.job.moment("halt")
        timing = self.job.timing
        end = self.world.now + (timing.durable_stand_s if self.boundary.durable else timing.stand_s)
        self.world.at(end, self.execution.poke)
        yield lambda: self.fenced() or self.world.now >= end
        self.check()

    def _wait_acked(self) -> Thread:
        yield from self._wait(lambda: self.mailbox.acked >= self.kept.step)

    def _complete(self, following: State, due: bool) -> Thread:
        written = None
        if due:
            written = yield from self._write(following, wait=not self.job.setup.device)
        # A snapshot becomes valid, or an abort begins: never both.
        self.check()
        self.state, self.step = following, following.step
        self.dirty = self.torn = False
        if written is not None:
            self.kept = following
            if self.job.setup.device:
                self.copying = written
                self.world.after(self.job.between(self.job.setup.copy_s), self._copied, written, following)
            else:
                self.say(written)

    def _copied(self, written: w.SnapshotDone, state: State) -> None:
        """The device has come to the end of the copy. What it held in an aborted generation may be garbage."""
        if self.execution.postponed(self._copied, written, state):
            return
        memory = self.files[written.buffer]
        write_state(memory, state, written)
        if self.copying is written and not self.fenced():
            self.copying = None
            self.say(written)
            self.execution.poke()
        elif self.fenced():
            spoil(memory)

    def _write(self, state: State, *, wait: bool) -> Generator[Yield, None, w.SnapshotDone]:
        """Fill a buffer, or begin to."""
        job = self.job
        shared, unique = snapshot_nbytes(state.step, shared=bool(self.peers))
        if not self.files or self.files[0].nbytes < shared + unique:
            before = self.mailbox.grants()
            buffers = 2 + (job.setup.durable_steps > 0) + (job.setup.integrity > 0)
            self.say(w.Reserve(nbytes=int((shared + unique) * GROWTH), buffers=buffers))
            yield from self._wait(lambda: self.mailbox.grants() > before)
        index = self.mailbox.free
        memory = self.files[index]
        self.say(w.SnapshotBegin(buffer=index))
        spoil(memory)
        job.moment("snapshot")
        done = w.SnapshotDone(
            generation=self.generation,
            step=state.step,
            buffer=index,
            shared_nbytes=shared,
            unique_nbytes=unique,
            durable=self.durable(state.step) and not job.setup.integrity,
        )
        if wait:
            yield job.between(job.setup.copy_s)
            write_state(memory, state, done)
        return done

    # --- recovery --------------------------------------------------------------------------------------------------

    def _recover(self) -> Thread:
        """Park, wait for a plan, follow it; again if it is over before."""
        while True:
            told = self.mailbox.generation_told
            if told > self._parked_for:
                yield self.world.between(0.0001, 0.01)
                if self.mailbox.generation_told != told:
                    continue
                self._park(told)
            yield lambda told=told: self.mailbox.connect is not None or self.mailbox.generation_told > told  # type: ignore[misc]
            plan = self.mailbox.connect
            if plan is None or plan.generation != self.mailbox.generation_told:
                continue
            try:
                yield from self._apply(plan)
                return
            except Fenced:
                continue
            except IntegrityError as error:
                self.say(w.Failed(generation=self.generation, detail=str(error), restore=True))
                yield from self._trouble(str(error))

    def _park(self, told: int) -> None:
        self._parked_for = told
        certain = self.copying is None and self.kept.step == self.step
        self.torn = self.torn or (self.job.setup.device and not certain)
        self.say(w.Parked(generation=told, step=self.step, dirty=self.dirty, torn=self.torn, groups={}))

    def _apply(self, plan: w.Connect) -> Thread:
        self.mailbox.require(plan.generation)
        self.generation = plan.generation
        assert self.mailbox.fence is not None, "a plan comes after its fence"
        self.membership = f"generation {plan.generation} ({', '.join(self.mailbox.fence.places)})"
        yield from self._meet(plan.generation)
        yield from self.collective("connect")
        self.check()
        self.say(w.Connected(generation=plan.generation))
        yield from self._wait(lambda: self.mailbox.load is not None)
        load = self.mailbox.load
        assert load is not None, "it was waited for"
        yield from self._restore(load)
        yield from self.collective("materialise")
        self.check()
        self.torn = self.dirty = False
        self.copying = None
        self.interval = 1
        self.boundary.restart()
        self.comparison.restart(self.step)
        self.kept = self.state
        if load.buffer < 0:
            written = yield from self._write(self.state, wait=True)
            self.check()
            self.say(replace(written, durable=False))
        self.say(w.Restored(generation=load.generation, step=self.step))
        yield from self._wait(lambda: self.mailbox.go == load.generation)

    def _meet(self, generation: int) -> Thread:
        """The rendezvous of the groups: everyone publishes an address and waits for those of all others."""
        self.say(m.KvSet(generation=generation, key=f"address/{self.slot}", value=self.node.encode()))
        for slot in range(self.slots):
            key = f"address/{slot}"
            self.say(m.KvGet(generation=generation, key=key))
            yield from self._wait(lambda key=key: self.mailbox.value(key) is not None)  # type: ignore[misc]

    def _restore(self, load: w.Load) -> Thread:
        self.torn = self.torn or load.source not in (SourceKind.LIVE, SourceKind.FRESH)
        yield self.job.between(self.job.setup.restore_s)
        if load.source is SourceKind.CHECKPOINT:
            yield self.job.storage.delay_s()
            self.state = self.job.storage.read(load.resume_step, self.slot, self.slots)
        elif load.source is SourceKind.FRESH:
            self.state = State(step=0, history=ROOT, position=0)
        elif load.buffer >= 0:
            self._read(load)
        self.step = load.resume_step

    def _read(self, load: w.Load) -> None:
        """A live worker has the tensors; only what moves during an attempt comes from the snapshot."""
        memory = self.files[load.buffer]
        made_in = self.job.chronicle.memberships.get(read_generation(memory, load.shared_nbytes))
        if made_in is not None and len(made_in) * self.job.setup.width != self.slots:
            raise Violation(f"{self.name} of {self.slots} restores what one of a job of {len(made_in)} nodes has made")
        if load.source is SourceKind.LIVE:
            self.state = replace(self.state, position=read_unique(memory.view()[load.shared_nbytes :]).position)
        else:
            self.state = read_state(memory, load.shared_nbytes)
        if read_unique(memory.view()[load.shared_nbytes :]).step != load.resume_step:
            raise IntegrityError(f"the snapshot for step {load.resume_step} is of {self.state}")
