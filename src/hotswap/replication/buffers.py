"""The buffers a vault consists of, and the rules about their contents."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hotswap.core.types import Generation, Held, HeldKind, Slot, Step
from hotswap.errors import LayoutMismatch, ProtocolError
from hotswap.replication.memory import MemoryFile, require_available
from hotswap.replication.sections import SectionId


@dataclass(eq=False)
class Buffer:
    """Memory for one version. Guarded by the vault's lock; ``content`` is None unless the version is whole.

    ``retired``: no longer in use for new versions; its memory goes once it has no content, reader or pin.
    """

    memory: MemoryFile
    content: SectionId | None = None
    checksums: tuple[int, ...] | None = None
    readers: int = 0
    pins: int = 0
    writing: bool = False
    retired: bool = False

    @property
    def idle(self) -> bool:
        """Whether nobody would notice if it were written to or closed."""
        return self.content is None and not self.readers and not self.pins and not self.writing


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where a complete own snapshot is: index of the buffer among those its worker was granted, and its lengths."""

    slot: Slot
    step: Step
    buffer: int
    shared_nbytes: int
    unique_nbytes: int


class Budget:
    """Counts the bytes of a vault's memory files."""

    def __init__(self) -> None:
        """Nothing reserved yet."""
        self._lock = threading.Lock()
        self.bytes_reserved = 0
        self.bytes_peak = 0

    def create(self, name: str, nbytes: int, count: int) -> list[Buffer]:
        """New buffers of at least *nbytes* bytes each. UsageError if memory is short; then there are none.

        All at the same time: the kernel fills each with zeros, by one processor at about 2 GB/s.
        """
        require_available(name, count * nbytes)
        with ThreadPoolExecutor(max(1, count), thread_name_prefix="hotswap-memory") as pool:
            making = [pool.submit(MemoryFile.create, name, max(1, nbytes)) for _ in range(count)]
        made = [future.result() for future in making if future.exception() is None]
        for error in filter(None, (future.exception() for future in making)):
            for memory in made:
                memory.close()
            raise error
        with self._lock:
            self.bytes_reserved += sum(memory.nbytes for memory in made)
            self.bytes_peak = max(self.bytes_peak, self.bytes_reserved)
        return [Buffer(memory) for memory in made]

    def close(self, buffer: Buffer) -> None:
        """Free a buffer."""
        if buffer.memory.closed:
            return
        with self._lock:
            self.bytes_reserved -= buffer.memory.nbytes
        buffer.memory.close()


def clear(buffer: Buffer) -> None:
    """What is in *buffer* no longer counts."""
    buffer.content = None
    buffer.checksums = None


def age(buffer: Buffer) -> tuple[Step, Generation]:
    """Sort key: empty first, then by step; of two versions of one step the later generation is the newer."""
    return (-1, -1) if buffer.content is None else (buffer.content.step, buffer.content.generation)


def supersede(buffers: Iterable[Buffer], entry: Buffer, section: SectionId) -> None:
    """Drop what *section* replaces: the same step, and later steps of earlier generations, which have been undone."""
    for other in buffers:
        if other is entry or other.content is None:
            continue
        undone = other.content.step > section.step and other.content.generation < section.generation
        if undone or other.content.step == section.step:
            clear(other)


def newest(buffers: Iterable[Buffer]) -> Buffer | None:
    """The buffer with the newest complete version, if any is complete."""
    return max((buffer for buffer in buffers if buffer.content is not None), key=age, default=None)


def with_step(buffers: Iterable[Buffer], step: Step) -> Buffer | None:
    """The buffer with a complete version of *step*."""
    return next((buffer for buffer in buffers if buffer.content is not None and buffer.content.step == step), None)


def require_progress(buffers: Iterable[Buffer], section: SectionId) -> None:
    """ProtocolError if *section* is older than what has already been complete here."""
    for buffer in buffers:
        known = buffer.content
        if known is not None and known.generation >= section.generation and known.step > section.step:
            raise ProtocolError(f"a replica of {section} was offered after one of {known}")


def require_room(entry: Buffer, section: SectionId) -> None:
    """LayoutMismatch if both sections of *section* do not fit into the buffer."""
    nbytes = section.shared_nbytes + section.unique_nbytes
    if nbytes > entry.memory.nbytes:
        raise LayoutMismatch(
            f"the snapshot of {section} has {nbytes} bytes, more than the {entry.memory.nbytes} reserved"
        )


def locate(index: int, section: SectionId) -> Located:
    """*section* as its worker is told about it."""
    return Located(
        slot=section.owner,
        step=section.step,
        buffer=index,
        shared_nbytes=section.shared_nbytes,
        unique_nbytes=section.unique_nbytes,
    )


def describe(kind: HeldKind, section: SectionId) -> Held:
    """*section* as the coordinator is told about it."""
    return Held(
        slot=section.owner,
        step=section.step,
        kind=kind,
        shared_nbytes=section.shared_nbytes,
        unique_nbytes=section.unique_nbytes,
    )
