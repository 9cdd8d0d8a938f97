"""What agents and the coordinator say to each other. Plain data: the wire package encodes it, the state machines act on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from hotswap.core.keep import GroupState
from hotswap.core.progress import Progress
from hotswap.core.types import Endpoint, Generation, Held, NodeId, Slot, Source, Step, Suspicion, WorkerState

# --- agent to coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerBuilt:
    """The worker of *slot* has built its model (and rehearsed, if it is a spare's) and waits for a plan.

    ``shape`` is equal for two slots that run the same program; ``peers`` are the slots that hold the same shared state; ``role``
    is equal for two that do the same with other data.
    """

    slot: Slot
    generation: Generation
    shape: str
    peers: tuple[Slot, ...] = ()
    rehearsed: bool = False
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class Register:
    """First message of every connection. After a coordinator restart it carries all that the coordinator needs to know.

    ``generation`` is the newest fence the agent has accepted (0: none), ``places`` the membership that goes with it,
    ``training`` whether that generation was told to go. ``protected``: a worker of this node has called ``hotswap.init()``.
    ``peers`` as in WorkerBuilt, also of workers that have ended since: nobody may be left who could tell it again. ``plans``
    as in Fence, and the plan of *generation* if it is known here.
    ``leaves_in_s``: this node was told to leave, as in NodeDraining; None: it is there to stay. ``size_since`` as in Fence.
    """

    node: NodeId
    fault_domain: str
    endpoint: Endpoint
    generation: Generation = 0
    places: tuple[NodeId, ...] = ()
    planned: bool = False
    training: bool = False
    built: tuple[WorkerBuilt, ...] = ()
    acked: dict[Slot, Step] = field(default_factory=dict)
    lost: tuple[Slot, ...] = ()
    finished: tuple[Slot, ...] = ()
    checkpoint_step: Step | None = None
    protected: bool = True
    peers: dict[Slot, tuple[Slot, ...]] = field(default_factory=dict)
    leaves_in_s: float | None = None
    plans: tuple[tuple[Generation, Step], ...] = ()
    size_since: Generation = 0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Still there. ``acked``: for each slot, the newest step whose snapshot is complete here and at its holders.

    ``progress``: how far each worker of *generation* is. ``protected`` as in Register.
    """

    generation: Generation
    acked: dict[Slot, Step] = field(default_factory=dict)
    progress: dict[Slot, Progress] = field(default_factory=dict)
    protected: bool = True


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """The process of *slot* is gone. ``status`` is its exit code, or minus the signal that ended it."""

    slot: Slot
    generation: Generation
    status: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerTrouble:
    """A collective failed under a live worker: a peer is probably gone, though nobody has said so yet."""

    slot: Slot
    generation: Generation
    detail: str


@dataclass(frozen=True, kw_only=True)
class NodeFenced:
    """This node has left the old generation: its live workers are parked and nothing more of it can become valid.

    ``unreachable``: nodes to which no connection could be made, if the fence asked to try. ``suspicion``: a comparison of
    states has failed since the last plan.
    """

    generation: Generation
    held: tuple[Held, ...]
    workers: tuple[WorkerState, ...]
    groups: dict[Slot, dict[str, GroupState]] = field(default_factory=dict)
    checkpoint_step: Step | None = None
    unreachable: tuple[NodeId, ...] = ()
    suspicion: Suspicion | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerConnected:
    """The worker's groups are formed in this generation."""

    slot: Slot
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """The worker is at the resume step and its snapshot of it is complete, here and at its holder."""

    slot: Slot
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class WorkerFinished:
    """The worker's script ended with exit code 0."""

    slot: Slot
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class RestoreFailed:
    """A slot's state could not be had from the planned source; ``detail`` says why."""

    slot: Slot
    generation: Generation
    detail: str


@dataclass(frozen=True, kw_only=True)
class WorkerRaised:
    """The script has raised an error of its own; its process may end because of it, or be told that a loss explains it."""

    slot: Slot
    generation: Generation
    error: str


@dataclass(frozen=True, kw_only=True)
class NodeDraining:
    """This node was told to leave, for *reason*, and will be gone in *leaves_in_s* seconds: replace it before."""

    leaves_in_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerHalted:
    """The worker of *slot* stands still at the boundary before *step*, which is in two places, and waits for a fence for a while."""

    slot: Slot
    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """The durable checkpoint of *slot* at *step* is on storage, made from a snapshot of *generation*."""

    slot: Slot
    step: Step
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted:
    """The durable checkpoint of *step* counts: its manifest is on storage, and it outlives all nodes."""

    step: Step


@dataclass(frozen=True, kw_only=True)
class SnapshotsPaced:
    """After *step*, snapshots of all slots are *interval* steps apart; one slot speaks for all."""

    slot: Slot
    generation: Generation
    step: Step
    interval: int


@dataclass(frozen=True, kw_only=True)
class StateCompared:
    """Slots that hold the same state have compared it at *step*; one slot speaks for all as long as they agree.

    ``odd``: slots that differ from most of their peers. ``undecided``: slots that differ, and nobody can say who is right.
    ``verified``: the newest step at which nobody differed, -1 if there was none; *step*, if all agree.
    """

    slot: Slot
    generation: Generation
    step: Step
    verified: Step
    odd: tuple[Slot, ...] = ()
    undecided: tuple[Slot, ...] = ()
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class KvSet:
    """Publish a value in the rendezvous of a generation."""

    generation: Generation
    key: str
    value: bytes


@dataclass(frozen=True, kw_only=True)
class KvGet:
    """Ask for a value; answered by KvValue as soon as it exists."""

    generation: Generation
    key: str


FromAgent = Union[
    Register,
    Heartbeat,
    WorkerBuilt,
    WorkerLost,
    WorkerTrouble,
    NodeFenced,
    WorkerConnected,
    WorkerReady,
    WorkerFinished,
    RestoreFailed,
    CheckpointShard,
    CheckpointCommitted,
    SnapshotsPaced,
    WorkerRaised,
    NodeDraining,
    WorkerHalted,
    StateCompared,
]


@dataclass(frozen=True, kw_only=True)
class Clue:
    """A line of a worker's output that matters, or a fact about it; the fields are those of ``diagnosis.Evidence``."""

    kind: str
    source: str
    text: str
    order: int = 0
    count: int = 1
    time: float | None = None
    gpu: str | None = None
    facts: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WorkerEvidence:
    """What the output of a worker that has ended says about why. For the record; no decision waits for it."""

    slot: Slot
    clues: tuple[Clue, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerStacks:
    """Where the threads of a worker are that hangs; taken before it is ended. For the record."""

    slot: Slot
    generation: Generation
    stacks: str


@dataclass(frozen=True, kw_only=True)
class NodeChecked:
    """What came out of a check of this node's health: a clue for each probe. For the record, and for a verdict."""

    clues: tuple[Clue, ...]


@dataclass(frozen=True, kw_only=True)
class Struck:
    """Answer to Strike: these processes were struck, or why none was. What ends or stops the agent itself is said just before."""

    number: int
    pids: tuple[int, ...] = ()
    refusal: str = ""


AsideMessage = Union[KvSet, KvGet, WorkerEvidence, WorkerStacks, NodeChecked, Struck]
"""From agents as well, but the coordinator's state machine never sees them: the rendezvous and the record."""


# --- coordinator to agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fence:
    """A new membership. Everything of an older generation is void from here on.

    ``lost``: slots whose process is new and holds nothing. ``positions``: for a spare, the positions to build workers for.
    ``valid_to``: the node has missed a plan and must drop all snapshots and replicas of later steps before it answers: they
    belong to a future that was undone. None: it may keep everything. ``probe``: nobody knows why the last generation failed;
    try to reach all other nodes before you answer. ``plans``: generation and resume step of all plans that still matter, for a
    coordinator that has to begin without a log. ``size_since``: the generation in which the job got its present number of slots;
    what is of an older one, in memory and as a process, is of other slots and must go.
    """

    generation: Generation
    places: tuple[NodeId, ...]
    endpoints: dict[NodeId, Endpoint]
    lost: tuple[Slot, ...] = ()
    positions: tuple[int, ...] = ()
    valid_to: Step | None = None
    probe: bool = False
    plans: tuple[tuple[Generation, Step], ...] = ()
    size_since: Generation = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the generation gets its state: resume step, source of each slot, holders of each slot, groups that are kept.

    ``push``: for each slot, those of its holders that do not have the resume step yet.
    """

    generation: Generation
    resume_step: Step
    sources: dict[Slot, Source]
    holders: dict[Slot, tuple[NodeId, ...]]
    push: dict[Slot, tuple[NodeId, ...]]
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Go:
    """Every slot is ready: train. A spare may free what it held for the nodes that do, but for what all agreed on last."""

    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """To who has no workers in training: all slots agree on *step*. What is kept of earlier ones for the case of a difference may go."""

    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class EndHung:
    """The worker of *slot* keeps others waiting: unless it advances again, take its stacks and end it."""

    generation: Generation
    slot: Slot
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckNode:
    """This node may be to blame for something: check its health, without disturbing its workers, and say what came out."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Halt:
    """Agree at the commit gate on a step after which all workers stand still, with a snapshot of it; ``durable``: on storage too."""

    generation: Generation
    durable: bool = False


@dataclass(frozen=True, kw_only=True)
class DrainNode:
    """Somebody wants this node to leave: answer with NodeDraining."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A drill (``core/drills.py``): strike processes of this node, and answer with Struck and the same number.

    ``slot``: of the worker that is meant, -1 if none is. ``reason``: who ordered it.
    """

    number: int
    fault: str
    slot: Slot = -1
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CommitCheckpoint:
    """Every slot's shard of this durable checkpoint is on storage: write the manifest that makes it count.

    ``generations``: for each slot, that of its shard. Another one that lies there is of a future that was undone.
    """

    step: Step
    generations: dict[Slot, Generation]


@dataclass(frozen=True, kw_only=True)
class Salvage:
    """The job is about to give up: write the state of *step* of these slots to storage, each from its source."""

    generation: Generation
    step: Step
    sources: dict[Slot, Source]


@dataclass(frozen=True, kw_only=True)
class KvValue:
    """Answer to KvGet."""

    generation: Generation
    key: str
    value: bytes


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The job is over; end your workers and exit."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Whoever says this leads the coordinators of the job since *term*; said first, and again and again.

    What a leader of an earlier term says is refused, and so is one that has fallen silent. A coordinator that is alone does not
    say it.
    """

    term: int


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Whoever says this does not lead. The leader of *term* is at *host* and *port*; empty if none is known. Ends the connection.

    An operator's command gets it, with no address, also from a coordinator that leads but still hears the nodes that there were.
    """

    term: int
    host: str = ""
    port: int = 0


ToAgent = Union[
    Lead,
    Follow,
    Fence,
    Plan,
    Go,
    Agreed,
    EndHung,
    CheckNode,
    Halt,
    DrainNode,
    Strike,
    Salvage,
    CommitCheckpoint,
    KvValue,
    Stop,
]
