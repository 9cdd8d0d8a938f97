"""This node's part in durable checkpoints: its slots' shards, made from the snapshots in its memory, and what counts on storage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core.types import Generation, HeldKind, Slot, Step
from hotswap.errors import HotswapError, UsageError
from hotswap.replication import durable_index
from hotswap.replication.buffers import Located
from hotswap.replication.sections import NotHeld
from hotswap.replication.vault import Vault

log = logging.getLogger("hotswap.memory")
RETRY_S = 0.05
CHECKPOINTS_KEPT = 2
WRITER = "hotswap.session.checkpoint_writer:main"
CallProcess = Callable[[str, list[Any], list[int], list[str], Callable[[int], None]], None]
"""Runs a function in a process of its own: target, arguments, descriptors, their names, what to do with the exit status."""


class Checkpoints:
    """Storage is slow and may fail: nothing here keeps training waiting, or ends it. All methods run on the event loop's thread."""

    def __init__(
        self,
        config: AgentConfig,
        vault: Vault,
        threads: Executor,
        start: Callable[[Coroutine[Any, Any, None]], object],
        on_written: Callable[[Slot, Step, Generation], None],
        on_committed: Callable[[Step], None],
    ) -> None:
        """*start* runs a coroutine beside others. *on_written*: a shard is on storage; *on_committed*: a whole checkpoint counts."""
        self._config = config
        self._vault = vault
        self._threads = threads
        self._start = start
        self._on_written = on_written
        self._on_committed = on_committed
        self.step: Step | None = None
        """The newest one that ``find`` has found."""
        self._generation: Generation = 0
        self._looking: asyncio.Task[Step | None] | None = None
        self._writing: set[tuple[Slot, Step]] = set()
        """Snapshots from which shards are being made."""

    def fence(self, generation: Generation) -> None:
        """Older generations have ended: what still waits to be written in one of them may be overwritten."""
        self._generation = generation

    def write(self, slot: Slot, step: Step, generation: Generation | None, call: CallProcess) -> None:
        """Start to write the own snapshot of *step* to storage; training never waits for it and never fails by it.

        *generation*: the one it was made in; None: what is written says which. While the last one is still being written, this one
        waits, for as long as the snapshot is here.
        """
        try:
            located = self._pin(slot, step)
        except HotswapError as error:
            later = self._write_later(slot, step, generation, call, error, fenced_in=self._generation)
            self._start(later)
        else:
            self._write(slot, step, generation, call, located)

    def _newest(self, slot: Slot) -> Step:
        own = (item.step for item in self._vault.inventory() if item.slot == slot and item.kind is HeldKind.OWN)
        return max(own, default=-1)

    def _pin(self, slot: Slot, step: Step) -> Located:
        if (slot, step) in self._writing:
            raise UsageError("it is being written already")
        located = self._vault.pin(slot, step)
        self._writing.add((slot, step))
        return located

    def _unpin(self, slot: Slot, step: Step) -> None:
        self._vault.unpin(slot, step)
        self._writing.discard((slot, step))

    async def _write_later(
        self,
        slot: Slot,
        step: Step,
        generation: Generation | None,
        call: CallProcess,
        error: HotswapError,
        *,
        fenced_in: Generation,
    ) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.timing.phase_s
        while not isinstance(error, NotHeld) and loop.time() < end:
            await asyncio.sleep(RETRY_S)
            # Its worker may have been told to write there next, unless it is parked, or this is the newest that it has made.
            if self._generation != fenced_in or (generation is not None and self._newest(slot) != step):
                break
            try:
                located = self._pin(slot, step)
            except HotswapError as again:
                error = again
            else:
                self._write(slot, step, generation, call, located)
                return
        log.warning("no durable checkpoint of slot %d at step %d: %s", slot, step, error)

    def _write(
        self, slot: Slot, step: Step, generation: Generation | None, call: CallProcess, located: Located
    ) -> None:
        assert self._config.checkpoint_dir is not None, "only asked for where there is a directory"
        memory = self._vault.granted(slot)[located.buffer]
        path = str(durable_index.slot_directory(Path(self._config.checkpoint_dir), step, slot))

        def done(status: int) -> None:
            self._unpin(slot, step)
            if status == 0 and generation is None:
                self._start(self._tell_written(slot, step))
            elif status == 0 and generation is not None:
                self._on_written(slot, step, generation)
            else:
                log.warning(
                    "durable checkpoint of slot %d at step %d failed with status %d (see helpers.log); training goes on",
                    slot,
                    step,
                    status,
                )

        args = [path, memory.nbytes, located.shared_nbytes, located.unique_nbytes]
        try:
            call(WRITER, args, [memory.fd], ["HOTSWAP_SNAPSHOT_FD"], done)
        except (HotswapError, OSError) as error:
            self._unpin(slot, step)
            log.warning("the writer of a durable checkpoint could not be started: %s", error)

    async def _tell_written(self, slot: Slot, step: Step) -> None:
        try:
            self._on_written(slot, step, await self._written_in(slot, step))
        except (OSError, HotswapError) as error:
            log.warning("durable checkpoint of slot %d at step %d: %s", slot, step, error)

    async def _written_in(self, slot: Slot, step: Step) -> Generation:
        """The generation that a shard on storage is of."""
        path = durable_index.slot_directory(Path(self._config.checkpoint_dir or ""), step, slot)
        return (await asyncio.to_thread(durable_index.record, path)).generation

    async def find(self) -> None:
        """Look which durable checkpoint is the newest that counts; storage that does not answer has none to offer."""
        if not self._config.checkpoint_dir:
            return
        if self._looking is None:
            look = asyncio.to_thread(durable_index.latest, Path(self._config.checkpoint_dir))
            self._looking = asyncio.get_running_loop().create_task(look)
        done, _ = await asyncio.wait({self._looking}, timeout=self._config.timing.detection_budget_s)
        for look_up in done:
            self._looking = None
            try:
                self.step = look_up.result()
            except OSError as error:
                log.warning("durable checkpoints cannot be looked for: %s", error)

    def commit(self, step: Step, generations: Mapping[Slot, Generation]) -> None:
        """Every slot's part is on storage: write the manifest, then drop old checkpoints."""
        if self._config.checkpoint_dir:
            self._start(self._commit(Path(self._config.checkpoint_dir), step, generations))

    async def _commit(self, directory: Path, step: Step, generations: Mapping[Slot, Generation]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, durable_index.commit, directory, step, generations)
            self._on_committed(step)
            await loop.run_in_executor(self._threads, durable_index.prune, directory, CHECKPOINTS_KEPT)
        except (OSError, HotswapError) as error:
            log.warning("durable checkpoint of step %d: %s; training goes on without it", step, error)
