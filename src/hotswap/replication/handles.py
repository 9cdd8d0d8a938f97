"""The handles under which a vault's buffers are read and written outside its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from hotswap.errors import Fenced
from hotswap.replication.buffers import Buffer, Located
from hotswap.replication.crc import crc32
from hotswap.replication.sections import CHUNK_NBYTES, SectionId, SectionKind, checksums, require_equal, spans


class Lease:
    """Read access to one section of one complete version. A context manager; the memory stays while it is open."""

    def __init__(
        self, buffer: Buffer, section: SectionId, kind: SectionKind, offset: int, release: Callable[[Buffer], None]
    ) -> None:
        """Made by the vault, which has counted the reader."""
        self.section = section
        self.kind = kind
        self.offset = offset
        self.nbytes = section.nbytes(kind)
        self.checksums = buffer.checksums if kind is SectionKind.UNIQUE else None
        self._buffer = buffer
        self._release: Callable[[Buffer], None] | None = release

    @property
    def fd(self) -> int:
        """Memory file in which the section starts at ``offset``."""
        return self._buffer.memory.fd

    @property
    def view(self) -> memoryview:
        """The section's bytes. Not to be written to; drop it before the lease ends."""
        return self._buffer.memory.view()[self.offset : self.offset + self.nbytes]

    @property
    def intact(self) -> bool:
        """Whether the version is still there. Ask after reading: its worker may have begun to write over it."""
        return self._buffer.content is self.section

    def remember(self, found: Sequence[int]) -> None:
        """Keep the checksums of a unique section once they are known, so that a later restore can be checked."""
        if self.intact and self.kind is SectionKind.UNIQUE:
            self._buffer.checksums = tuple(found)

    def copy_to(self, into: memoryview, where: str, *, threads: int = 1) -> None:
        """Copy the section to *into*, by up to *threads* threads that let others run, and compare checksums if they are known.

        IntegrityError, after which *into* is void, if the bytes no longer have the checksums they were stored with.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="hotswap-copy") as pool:
            copied = pool.map(lambda part: self._copy_part(into, *part), spans(self.nbytes, threads))
            found = tuple(value for sums in copied for value in sums)
        if self.checksums is not None:
            what = f"{self.kind.value} section of {self.section}"
            require_equal(found, self.checksums, what=what, where=where)

    def _copy_part(self, into: memoryview, start: int, stop: int) -> list[int]:
        sums = []
        for begin in range(start, stop, CHUNK_NBYTES):
            chunk = into[begin : min(begin + CHUNK_NBYTES, stop)]
            self._buffer.memory.read_into(chunk, self.offset + begin)
            if self.checksums is not None:
                sums.append(crc32(chunk))
        return sums

    def close(self) -> None:
        """Give the access back."""
        release, self._release = self._release, None
        if release is not None:
            release(self._buffer)

    def __enter__(self) -> Lease:
        """The lease itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


@dataclass(eq=False, kw_only=True)
class Writer:
    """A version that is being written into a buffer, and is invisible until ``commit``.

    It dies when its generation is fenced off or a later writer takes its place; then ``commit`` raises Fenced. Its
    buffer is not handed out again before ``abandon`` says that nobody writes to it any more.
    """

    section: SectionId
    where: str
    buffer: Buffer
    publish: Callable[[Writer, tuple[int, ...] | None], Located | None]
    withdraw: Callable[[Writer], None]
    dead: str = ""
    ended: bool = False

    def kill(self, why: str) -> None:
        """Make sure that this version never becomes visible. Called by the vault, under its lock."""
        self.dead = self.dead or why

    def require_alive(self) -> None:
        """Fenced if this version can no longer become visible: stop writing."""
        if self.dead:
            raise Fenced(f"the copy of {self.section} {self.where} was given up: {self.dead}")

    def abandon(self) -> None:
        """Give the buffer back; what was written is void. Harmless after ``commit``."""
        self.withdraw(self)


class ReplicaWriter(Writer):
    """A replica that is being received."""

    @property
    def view(self) -> memoryview:
        """Where the unique section's bytes go."""
        return self.buffer.memory.view()[: self.section.unique_nbytes]

    def commit(self, expected: Sequence[int], found: Sequence[int] | None = None) -> None:
        """Make the replica visible if its bytes have the *expected* checksums.

        *found*: the checksums of what was written, if the caller computed them on the way; else they are computed
        here. IntegrityError on a mismatch, Fenced if the writer has died; the buffer is given back in either case.
        """
        try:
            self.require_alive()
            actual = checksums(self.view) if found is None else found
            require_equal(actual, expected, what=f"replica of {self.section}", where=self.where)
            self.publish(self, tuple(expected))
        finally:
            self.abandon()


class Adoption(Writer):
    """An own snapshot that is being put together from fetched sections."""

    @property
    def shared(self) -> memoryview:
        """Where the shared section's bytes go."""
        return self.buffer.memory.view()[: self.section.shared_nbytes]

    @property
    def unique(self) -> memoryview:
        """Where the unique section's bytes go."""
        start = self.section.shared_nbytes
        return self.buffer.memory.view()[start : start + self.section.unique_nbytes]

    def commit(self, unique_checksums: Sequence[int] | None = None) -> Located:
        """Make the snapshot visible; both sections are complete and were checked. Fenced if the writer has died."""
        try:
            self.require_alive()
            located = self.publish(self, None if unique_checksums is None else tuple(unique_checksums))
            assert located is not None, "publishing an own snapshot says where it is"
            return located
        finally:
            self.abandon()
