"""This worker's snapshots: the agent's memory as it is mapped here, and the protocol around writing and reading it."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.core.types import Generation, Slot, Step
from hotswap.errors import UsageError
from hotswap.replication.capture import Capture
from hotswap.replication.durable import load as load_durable
from hotswap.replication.memory import MemoryFile
from hotswap.session.mailbox import Mailbox
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

GROWTH = 1.25
"""Room beyond the first need: optimizer state appears with the first update."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A snapshot that is complete in memory but not yet announced."""

    generation: Generation
    step: Step
    buffer: int
    shared_nbytes: int
    unique_nbytes: int


class Snapshots:
    """Used by the training thread, but for ``take``, which the listening thread calls."""

    def __init__(self, link: WorkerLink, mailbox: Mailbox, slot: Slot, buffers: int) -> None:
        """*buffers*: how many to ask for."""
        self._link = link
        self._mailbox = mailbox
        self._slot = slot
        self._count = buffers
        self._files: list[MemoryFile] = []
        self._initial: tuple[bytearray, int, int] | None = None
        self.capture: Capture | None = None

    def take(self, granted: w.Granted, fds: list[int]) -> None:
        """Map memory the agent has granted."""
        for file in self._files:
            file.close()
        self._files = [MemoryFile.from_fd(fd) for fd in fds]

    def write(self, generation: Generation, step: Step) -> Written:
        """Copy the live state into the free buffer. It counts once ``announce`` was called."""
        capture = self._capture()
        self._require_room(generation, capture.nbytes())
        buffer = self._mailbox.free
        self._link.send(w.SnapshotBegin(buffer=buffer))
        shared, unique = capture.write(self._files[buffer].view(), slot=self._slot, generation=generation, step=step)
        return Written(generation=generation, step=step, buffer=buffer, shared_nbytes=shared, unique_nbytes=unique)

    def announce(self, written: Written, *, durable: bool) -> None:
        """Tell the agent that the snapshot is whole: from here on it may be replicated and restored from."""
        self._link.send(
            w.SnapshotDone(
                generation=written.generation,
                step=written.step,
                buffer=written.buffer,
                shared_nbytes=written.shared_nbytes,
                unique_nbytes=written.unique_nbytes,
                durable=durable,
            )
        )

    def wait_acked(self, generation: Generation, step: Step) -> None:
        """Wait until the snapshot of *step* is complete at its holder."""
        self._mailbox.wait(generation, lambda: self._mailbox.acked >= step or None)

    def read(self, load: w.Load, *, heavy: bool) -> None:
        """Load the state the agent has located in this worker's memory."""
        view = self._files[load.buffer].view()
        self._capture().read(
            view, load.shared_nbytes, load.unique_nbytes, slot=self._slot, step=load.resume_step, heavy=heavy
        )

    def load_durable(self, directory: str, step: Step) -> None:
        """Load the state from the durable checkpoint of *step*."""
        if not directory:
            raise UsageError("a durable checkpoint was planned but this worker has no --checkpoint-dir")
        memory, shared, unique = load_durable(directory, step, self._slot)
        self._capture().read(memory, shared, unique, slot=self._slot, step=step, heavy=True)

    def remember_initial(self) -> None:
        """Keep the state as built, in private memory, so that a rehearsal can be undone."""
        memory = bytearray(self._capture().nbytes())
        shared, unique = self._capture().write(memoryview(memory), slot=self._slot, generation=0, step=0)
        self._initial = (memory, shared, unique)

    def restore_initial(self) -> None:
        """Undo what a rehearsal did to the state."""
        assert self._initial is not None, "restore_initial comes after remember_initial"
        memory, shared, unique = self._initial
        self._capture().read(memoryview(memory), shared, unique, slot=self._slot, step=0, heavy=True)
        self._initial = None

    def _require_room(self, generation: Generation, nbytes: int) -> None:
        if self._files and self._files[0].nbytes >= nbytes:
            return
        with self._mailbox.lock:
            before = self._mailbox.grants()
        self._link.send(w.Reserve(nbytes=int(nbytes * GROWTH), buffers=self._count))
        self._mailbox.wait(generation, lambda: self._mailbox.grants() > before or None)

    def _capture(self) -> Capture:
        assert self.capture is not None, "protect comes first"
        return self.capture
