"""The memory of one node: buffers that workers write to, replicas of other nodes' slots, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hotswap.core.types import Held, HeldKind
from hotswap.sim.chronicle import GARBAGE, State


@dataclass(kw_only=True, eq=False)
class Buffer:
    """``content`` is what is in the memory, ``step`` and ``generation`` what the agent believes of it (-1: nothing whole)."""

    content: State = GARBAGE
    step: int = -1
    generation: int = -1

    def label(self, step: int, generation: int) -> None:
        """It is complete."""
        self.step, self.generation = step, generation

    def clear(self) -> None:
        """What is in it no longer counts."""
        self.step = self.generation = -1


@dataclass(kw_only=True)
class Memory:
    """``versions`` of each snapshot and of each replica. Two are enough; the simulator shows that one is not."""

    versions: int
    fence: int = 0
    own: dict[int, list[Buffer]] = field(default_factory=dict)
    replicas: dict[int, list[Buffer]] = field(default_factory=dict)

    def granted(self, slot: int) -> list[Buffer]:
        """The buffers that the worker of *slot* writes to."""
        return self.own.setdefault(slot, [Buffer() for _ in range(self.versions)])

    def free(self, slot: int) -> int:
        """The buffer for the next snapshot: not the newest one, while there is a choice."""
        buffers = self.granted(slot)
        return min(range(len(buffers)), key=lambda index: (buffers[index].step, buffers[index].generation))

    def find(self, slot: int, step: int) -> int:
        """Index of the own snapshot of *step*, -1 if there is none."""
        return next((index for index, buffer in enumerate(self.own.get(slot, ())) if buffer.step == step), -1)

    def complete(self, buffers: list[Buffer], entry: Buffer, step: int, generation: int) -> None:
        """A version is whole. What it replaces goes: the same step, and later ones of undone futures."""
        for other in buffers:
            if other is not entry and (other.step == step or (other.step > step and other.generation < generation)):
                other.clear()
        entry.label(step, generation)

    def receive(self, slot: int, state: State, step: int, generation: int) -> bool:
        """A replica has arrived; False if its generation is over."""
        if generation < self.fence:
            return False
        buffers = self.replicas.setdefault(slot, [Buffer() for _ in range(self.versions)])
        entry = min(buffers, key=lambda buffer: (buffer.step, buffer.generation))
        entry.content = state
        self.complete(buffers, entry, step, generation)
        return True

    def replica(self, slot: int, step: int) -> State | None:
        """A replica, or else an own snapshot."""
        buffers = [*self.replicas.get(slot, ()), *self.own.get(slot, ())]
        return next((buffer.content for buffer in buffers if buffer.step == step), None)

    def truncate(self, step: int) -> None:
        """Drop everything beyond *step*: it has been undone."""
        for buffers in [*self.own.values(), *self.replicas.values()]:
            for buffer in buffers:
                if buffer.step > step:
                    buffer.clear()

    def inventory(self) -> tuple[Held, ...]:
        """Every complete version."""
        return tuple(
            Held(slot=slot, step=buffer.step, kind=kind, unique_nbytes=1) for kind, slot, buffer in self.complete_ones()
        )

    def complete_ones(self) -> Iterator[tuple[HeldKind, int, Buffer]]:
        """Every complete version, own snapshots first."""
        for kind, table in ((HeldKind.OWN, self.own), (HeldKind.REPLICA, self.replicas)):
            for slot, buffers in table.items():
                yield from ((kind, slot, buffer) for buffer in buffers if buffer.step >= 0)
