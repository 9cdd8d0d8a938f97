"""This worker's snapshots: the agent's memory as it is mapped here, and the protocol around writing and reading it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.core.types import Generation, Slot, Step
from hotswap.errors import UsageError
from hotswap.replication.capture import Capture, pin
from hotswap.replication.durable import load as load_durable
from hotswap.replication.durable_index import manifest
from hotswap.replication.memory import MemoryFile
from hotswap.replication.resized import load_resized
from hotswap.session.mailbox import Mailbox
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

GROWTH = 1.25
"""Room beyond the first need: optimizer state appears with the first update."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A snapshot that is in memory, or will be, but is not yet announced.

    ``copied``: CUDA event after which it is whole; None if it already is.
    """

    generation: Generation
    step: Step
    buffer: int
    shared_nbytes: int
    unique_nbytes: int
    copied: Any = None

    def wait(self) -> None:
        """Wait until it is whole."""
        if self.copied is not None:
            self.copied.synchronize()


class Snapshots:
    """Used by the training thread, but for ``take``, which the listening thread calls."""

    def __init__(self, link: WorkerLink, mailbox: Mailbox, slot: Slot, buffers: int, *, pinned: bool = False) -> None:
        """*buffers*: how many to ask for. *pinned*: lock them for copies from and to a GPU."""
        self._link = link
        self._mailbox = mailbox
        self._slot = slot
        self._count = buffers
        self._files: list[MemoryFile] = []
        self._pinned = pinned
        self._pinning: threading.Thread | None = None
        self._unpin: list[Callable[[], None]] = []
        self._initial: tuple[bytearray, int, int] | None = None
        self.capture: Capture | None = None

    def take(self, granted: w.Granted, fds: list[int]) -> None:
        """Map memory the agent has granted."""
        self._finish_pinning()
        for unpin in self._unpin:
            unpin()
        self._unpin.clear()
        for file in self._files:
            file.close()
        files = self._files = [MemoryFile.from_fd(fd) for fd in fds]
        if self._pinned:
            # Takes a while for much memory, during which training may go on.
            self._pinning = threading.Thread(target=self._pin, args=(files,), name="hotswap-pin", daemon=True)
            self._pinning.start()
            return
        for file in files:
            file.view(populate=True)  # or the first snapshots would pay for the page faults

    def _pin(self, files: list[MemoryFile]) -> None:
        for file in files:
            self._unpin.append(pin(file.view()))

    def _finish_pinning(self) -> None:
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None

    def write(self, generation: Generation, step: Step) -> Written:
        """Copy the live state into the free buffer, or start to. It counts once it is whole and ``announce`` was called."""
        buffer = -1

        def room(nbytes: int) -> memoryview:
            nonlocal buffer
            self._require_room(generation, nbytes)
            self._finish_pinning()
            buffer = self._mailbox.free
            self._link.send(w.SnapshotBegin(buffer=buffer))
            return self._files[buffer].view()

        capture = self._capture()
        shared, unique = capture.write(room, slot=self._slot, generation=generation, step=step, asynchronous=True)
        return Written(
            generation=generation,
            step=step,
            buffer=buffer,
            shared_nbytes=shared,
            unique_nbytes=unique,
            copied=capture.copied,
        )

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

    def load_durable(self, directory: str, step: Step, slots: int) -> None:
        """Load the state from the durable checkpoint of *step*, which another number than *slots* may have written."""
        if not directory:
            raise UsageError("a durable checkpoint was planned but this worker has no --checkpoint-dir")
        if len(manifest(Path(directory), step)) == slots:
            memory, shared, unique = load_durable(directory, step, self._slot)
        else:
            self._capture().require_resizable()
            memory, shared, unique = load_resized(directory, step, self._slot, self._capture().specs())
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

    def reserve_ahead(self) -> None:
        """Ask for memory for the state as it is now: made, mapped and pinned before it is needed, which takes seconds for much."""
        self._link.send(w.Reserve(nbytes=int(self._capture().nbytes() * GROWTH), buffers=self._count, ahead=True))

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


class Announcer:
    """Announces snapshots as soon as they are whole, in a thread of its own.

    A snapshot becomes valid, or an abort begins: never both. What an aborted collective left is no state, and the copy
    behind it is only known to be free of it when it was done before the abort.
    """

    def __init__(self, snapshots: Snapshots, mailbox: Mailbox) -> None:
        """Nothing is started before the first snapshot that has to be waited for."""
        self._snapshots = snapshots
        self._mailbox = mailbox
        self._queue: queue.SimpleQueue[tuple[Written, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending: Written | None = None
        """A snapshot that has not become valid (yet); under the mailbox's lock."""

    def add(self, written: Written, *, durable: bool) -> None:
        """Announce *written* now if it is whole, else later. Called under the mailbox's lock."""
        if written.copied is None:
            self._snapshots.announce(written, durable=durable)
            return
        self.pending = written
        self._queue.put((written, durable))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hotswap-announce", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            written, durable = self._queue.get()
            # A device error shows in the training thread too, which decides what becomes of the process.
            with contextlib.suppress(RuntimeError):
                written.wait()
                with self._mailbox.lock:
                    if self.pending is written and not self._mailbox.fenced(written.generation):
                        self._snapshots.announce(written, durable=durable)
                        self.pending = None
