"""Storage that all nodes see, with durable checkpoints on it: slow or full at times, and it outlives every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotswap.errors import IntegrityError
from hotswap.sim.chronicle import Chronicle, State
from hotswap.sim.world import World

DELAY_S = (0.05, 1.5)
SLOW = 20.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """One slot's state on storage, and the generation that its snapshot was made in."""

    generation: int
    state: State


class Storage:
    """Follows ``replication.durable_index``: a manifest names the very shards it was made for."""

    def __init__(self, world: World, chronicle: Chronicle) -> None:
        """Empty."""
        self._world = world
        self._chronicle = chronicle
        self._shards: dict[tuple[int, int], Shard] = {}
        self._manifests: dict[int, dict[int, Shard]] = {}
        self.slow_to = self.full_to = 0.0

    def delay_s(self) -> float:
        """How long the next operation takes."""
        delay_s = self._world.between(*DELAY_S)
        return delay_s * SLOW if self._world.now < self.slow_to else delay_s

    def write(self, step: int, slot: int, generation: int, state: State) -> bool:
        """One slot's shard, whole, in place of one of another generation; False if there is no room."""
        if self._world.now < self.full_to:
            return False
        if (step, slot) in self._shards and self._shards[step, slot].generation == generation:
            return True
        self._shards[step, slot] = Shard(generation=generation, state=state)
        return True

    def generation(self, step: int, slot: int) -> int:
        """That a shard was made in."""
        return self._shards[step, slot].generation

    def commit(self, step: int, generations: Mapping[int, int]) -> None:
        """Make a step count. OSError if a shard is missing, or not the one that is meant, or the disk is full."""
        if self._world.now < self.full_to:
            raise OSError("no space left on device")
        shards = {slot: shard for slot in generations if (shard := self._shards.get((step, slot))) is not None}
        if {slot: shard.generation for slot, shard in shards.items()} != generations:
            raise OSError(f"the checkpoint of step {step} is not complete")
        states = {slot: shard.state for slot, shard in shards.items()}
        self._world.note(f"checkpoint of step {step}: {', '.join(map(str, states.values()))}")
        sizes = {len(self._chronicle.memberships[shard.generation]) for shard in shards.values()}
        slots = self._chronicle.width * max(sizes, default=0)
        self._chronicle.meet("a checkpoint", f"step {step} of a job of {sizes} nodes", states, slots)
        self._manifests[step] = shards

    def latest(self) -> int | None:
        """The newest step that counts."""
        return max((step for step in self._manifests if self._counts(step)), default=None)

    def read(self, step: int, slot: int, slots: int) -> State:
        """The state of one slot of *slots*, or of its predecessor. IntegrityError if the checkpoint is not whole."""
        if not self._counts(step):
            raise IntegrityError(f"the checkpoint of step {step} does not count")
        shards = self._manifests[step]
        return shards[slot if len(shards) == slots else slot % len(shards)].state

    def state(self, step: int) -> State | None:
        """What the checkpoint of *step* is of, None if it does not count."""
        return self._manifests[step][0].state if self._counts(step) else None

    def prune(self, keep: int) -> None:
        """Delete all but the newest *keep* steps that count, and unfinished ones that are older."""
        kept = sorted(step for step in self._manifests if self._counts(step))[-keep:]
        if kept:
            newest = kept[-1]
            self._manifests = {step: shards for step, shards in self._manifests.items() if step in kept}
            self._shards = {key: shard for key, shard in self._shards.items() if key[0] in kept or key[0] > newest}

    def _counts(self, step: int) -> bool:
        shards = self._manifests.get(step)
        return shards is not None and all(self._shards.get((step, slot)) is shard for slot, shard in shards.items())
