"""What is copied: the sections of a snapshot, their identity and their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from hotswap.core.types import Generation, Slot, Step
from hotswap.errors import IntegrityError, PeerFault
from hotswap.replication.crc import crc32

CHUNK_NBYTES = 4 * 1024 * 1024
"""One checksum covers this many bytes (the last one fewer). Part of the protocol: both ends cut at the same places."""


PART_NBYTES_MIN = 16 * 1024 * 1024
"""Another connection or thread is used only if each gets so many bytes: below, its round trips cost more than it gains."""


class NotHeld(PeerFault):
    """The copy that was asked for is not, or no longer, in that node's memory."""


class SectionKind(str, Enum):
    """Which part of a snapshot: what other slots have too, or what nobody else has."""

    SHARED = "shared"
    UNIQUE = "unique"


@dataclass(frozen=True, kw_only=True)
class SectionId:
    """One version of one owner's snapshot: ``shared_nbytes`` bytes followed by ``unique_nbytes`` bytes."""

    owner: Slot
    step: Step
    generation: Generation
    shared_nbytes: int
    unique_nbytes: int

    def __post_init__(self) -> None:
        """Assert what must hold for every snapshot; a codec turns the assertion into a ProtocolError."""
        assert self.owner >= 0, f"owner {self.owner} < 0"
        assert self.step >= 0, f"step {self.step} < 0"
        assert self.generation >= 0, f"generation {self.generation} < 0"
        assert self.shared_nbytes >= 0, f"shared_nbytes {self.shared_nbytes} < 0"
        assert self.unique_nbytes >= 0, f"unique_nbytes {self.unique_nbytes} < 0"

    def nbytes(self, kind: SectionKind) -> int:
        """Length of one section."""
        return self.shared_nbytes if kind is SectionKind.SHARED else self.unique_nbytes

    def offset(self, kind: SectionKind) -> int:
        """Where the section starts in an own snapshot's buffer."""
        return 0 if kind is SectionKind.SHARED else self.shared_nbytes

    def __str__(self) -> str:
        """As it reads in messages."""
        return f"slot {self.owner} at step {self.step} (generation {self.generation})"


def checksums(view: memoryview) -> tuple[int, ...]:
    """CRC-32 of each chunk of *view*."""
    return tuple(crc32(view[start : start + CHUNK_NBYTES]) for start in range(0, len(view), CHUNK_NBYTES))


def spans(nbytes: int, workers: int) -> list[tuple[int, int]]:
    """Ranges for as many connections or threads as are worth it, cut between chunks."""
    chunks = -(-nbytes // CHUNK_NBYTES)
    count = max(1, min(workers, nbytes // PART_NBYTES_MIN))
    return list(pairwise(min(nbytes, index * chunks // count * CHUNK_NBYTES) for index in range(count + 1)))


def require_equal(found: Sequence[int], expected: Sequence[int], *, what: str, where: str) -> None:
    """IntegrityError that names the first chunk whose checksum differs."""
    if tuple(found) == tuple(expected):
        return
    if len(found) != len(expected):
        raise IntegrityError(f"{what} {where}: {len(found)} checksums for {len(expected)} chunks; the copy is void")
    chunk = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    raise IntegrityError(f"{what} {where}: bytes from {chunk * CHUNK_NBYTES} on fail their checksum; the copy is void")
