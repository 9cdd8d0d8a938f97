"""What a worker and its agent say to each other over their socket pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from hotswap.core.keep import GroupState
from hotswap.core.messages import Fence, Go, Halt, KvGet, KvSet, KvValue
from hotswap.core.progress import Progress
from hotswap.core.types import Generation, Slot, SourceKind, Step

# --- worker to agent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The script has called ``hotswap.init()``: first message of a worker that is to be protected."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """Model and optimizer exist, the worker waits for its first plan. ``shape``, ``peers`` and ``role`` as in WorkerBuilt."""

    shape: str
    peers: tuple[Slot, ...]
    rehearsed: bool
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Ask for snapshot memory: *buffers* buffers of *nbytes* bytes each. Answered by Granted.

    ``ahead``: this is a spare, which has no use for it yet. Nobody waits for an answer, and there is none if memory is short.
    """

    nbytes: int
    buffers: int
    ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class SnapshotBegin:
    """*buffer* is about to be overwritten: what was in it no longer counts."""

    buffer: int


@dataclass(frozen=True, kw_only=True)
class SnapshotDone:
    """The snapshot of *step* is complete in *buffer*: ``[shared section | unique section]``."""

    generation: Generation
    step: Step
    buffer: int
    shared_nbytes: int
    unique_nbytes: int
    durable: bool = False


@dataclass(frozen=True, kw_only=True)
class Parked:
    """The main thread has left the old generation. ``groups``: what it did in each of its process groups."""

    generation: Generation
    step: Step
    dirty: bool
    torn: bool
    groups: dict[str, GroupState]


@dataclass(frozen=True, kw_only=True)
class Connected:
    """All groups are formed."""

    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state of the resume step is loaded; ``step`` is where this worker now stands."""

    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A collective failed though nobody has announced a failure."""

    generation: Generation
    detail: str


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The script has raised an error in which nothing speaks of communication; a fence may explain it yet."""

    generation: Generation
    error: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The script raised; ``restore`` if it was the restore of a snapshot that failed, not the script."""

    generation: Generation
    detail: str
    restore: bool = False


@dataclass(frozen=True, kw_only=True)
class Paced:
    """From *step* on, snapshots are *interval* steps apart; slot 0 speaks for all."""

    generation: Generation
    step: Step
    interval: int


@dataclass(frozen=True, kw_only=True)
class Halted:
    """As in WorkerHalted."""

    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """A comparison of the states of *step* has begun: its snapshots stay, and those of *verified*, the one before, for now."""

    generation: Generation
    step: Step
    verified: Step


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison has come to its end, as in StateCompared. If all agree, what was compared before is not needed any more.

    ``durable``: make a durable checkpoint of it.
    """

    generation: Generation
    step: Step
    verified: Step
    odd: tuple[Slot, ...] = ()
    undecided: tuple[Slot, ...] = ()
    detail: str = ""
    durable: bool = False


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """How far this worker is; said again and again, for silence tells something too."""

    generation: Generation
    progress: Progress


FromWorker = Union[
    Joined,
    Built,
    Reserve,
    SnapshotBegin,
    SnapshotDone,
    Parked,
    Connected,
    Restored,
    Trouble,
    Raised,
    Failed,
    Paced,
    Halted,
    Comparing,
    Compared,
    Progressed,
    KvSet,
    KvGet,
]

# --- agent to worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Granted:
    """Snapshot memory; the buffers' file descriptors come with the frame. The next snapshot goes to buffer *free*."""

    nbytes: int
    buffers: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Connect:
    """There is a plan: form the groups of *generation*, all but those in *keep*. The state may still be on its way."""

    generation: Generation
    keep: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Be at *resume_step*; everything that this needs is in this worker's memory, or on storage.

    ``buffer``: which of the granted buffers holds the snapshot of that step, -1 if none does; ``free``: where the next goes.
    """

    generation: Generation
    resume_step: Step
    source: SourceKind
    free: int
    buffer: int = -1
    shared_nbytes: int = 0
    unique_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Acked:
    """The snapshot of *step* is complete here and at the holder; *free* is the buffer for the snapshot after it."""

    generation: Generation
    step: Step
    free: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The job is over or this worker is not needed: leave with *exit_code*."""

    exit_code: int
    reason: str


ToWorker = Union[Fence, Granted, Connect, Load, Go, Halt, Acked, KvValue, Finish]
