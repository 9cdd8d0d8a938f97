"""All transitions of the job in one table. A pair that is not in it is an error: it changes nothing and is reported.

``docs/protocol.md`` draws its diagrams from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from hotswap.core import messages as m
from hotswap.core.events import Judged, NodeGone, StopAsked, Tick


class Phase(str, Enum):
    """Where the job stands. FENCING to REDOING are the phases of a recovery; a start goes through them as well."""

    FORMING = "forming"
    RECOLLECTING = "recollecting"
    FENCING = "fencing"
    WAITING = "waiting for a node"
    REBUILDING = "rebuilding"
    RESTORING = "restoring"
    REDOING = "redoing"
    TRAINING = "training"
    STOPPED = "stopped"


class Kind(str, Enum):
    """What happened."""

    REGISTERED = "node registered"
    GONE = "node gone"
    HEARTBEAT = "heartbeat"
    BUILT = "worker built"
    LOST = "worker lost"
    TROUBLE = "worker in trouble"
    FENCED = "node fenced"
    CONNECTED = "worker connected"
    READY = "worker ready"
    FINISHED = "worker finished"
    RESTORE_FAILED = "restore failed"
    SHARD_DURABLE = "checkpoint shard written"
    CHECKPOINT_COMMITTED = "checkpoint committed"
    PACED = "snapshot interval changed"
    RAISED = "script raised"
    DRAINING = "node has to leave"
    HALTED = "worker halted"
    COMPARED = "states compared"
    TICK = "time passed"
    STOP_ASKED = "stop asked"
    JUDGED = "verdict"


NEVER_STALE = frozenset(
    {Kind.REGISTERED, Kind.BUILT, Kind.LOST, Kind.SHARD_DURABLE, Kind.CHECKPOINT_COMMITTED, Kind.DRAINING}
)
"""A death stays a death, a model once built stays built, and what is on storage stays there."""
OF_A_SLOT = frozenset({Kind.BUILT, Kind.LOST, Kind.SHARD_DURABLE})
"""What outlives a generation, but not a change of the number of slots: the same number then means something else."""
OF_A_RECOVERY = frozenset({Kind.FENCED, Kind.CONNECTED, Kind.READY, Kind.RESTORE_FAILED})
OF_A_MEMBER = frozenset(
    {
        *(Kind.CONNECTED, Kind.READY, Kind.RESTORE_FAILED, Kind.FINISHED, Kind.TROUBLE, Kind.PACED, Kind.RAISED),
        Kind.HALTED,
        Kind.COMPARED,
    }
)

P, K = Phase, Kind

RUNNING = (P.FENCING, P.WAITING, P.REBUILDING, P.RESTORING, P.REDOING, P.TRAINING)
"""The phases in which there is a membership that this coordinator answers for."""
TRAINS = (P.REDOING, P.TRAINING)
"""The phases in which steps are made."""
_AFTER_LOSS = (P.FENCING, P.WAITING, P.STOPPED)


def _table() -> dict[tuple[Phase, Kind], frozenset[Phase]]:
    """(phase, kind) -> the phases it may lead to; staying in the phase is always among them."""
    table: dict[tuple[Phase, Kind], frozenset[Phase]] = {}

    def allow(phases: tuple[Phase, ...], kinds: tuple[Kind, ...], *to: Phase) -> None:
        for phase in phases:
            for kind in kinds:
                table[phase, kind] = table.get((phase, kind), frozenset({phase})).union(to)

    everywhere = (P.FORMING, P.RECOLLECTING, *RUNNING)
    allow(everywhere, (K.HEARTBEAT, K.GONE, K.DRAINING))
    allow(everywhere, (K.TICK, K.STOP_ASKED), P.STOPPED)
    allow((P.RECOLLECTING, *RUNNING), (K.BUILT, K.LOST, K.TROUBLE, K.SHARD_DURABLE, K.CHECKPOINT_COMMITTED, K.PACED))
    # A slot that differs is replaced as if it were lost; its node, if it is not the first time.
    allow((P.RECOLLECTING, *RUNNING), (K.COMPARED,))
    allow(TRAINS, (K.COMPARED,), *_AFTER_LOSS)
    # So is the node of a slow worker, if that was asked for.
    allow(TRAINS, (K.HEARTBEAT,), *_AFTER_LOSS)
    # Forming a job, or learning from the agents what an earlier coordinator knew.
    allow((P.RECOLLECTING, *RUNNING), (K.RAISED,), P.STOPPED)
    allow((P.FORMING,), (K.REGISTERED, K.TICK), P.FENCING)
    allow((P.FORMING,), (K.REGISTERED,), P.RECOLLECTING)
    allow((P.FORMING, P.RECOLLECTING), (K.REGISTERED,), P.TRAINING, P.FENCING, P.STOPPED)
    allow((P.RECOLLECTING,), (K.TICK,), P.TRAINING, *_AFTER_LOSS)
    allow((P.RECOLLECTING,), (K.FINISHED,))
    # A loss, at any moment, fences and starts over with a higher generation. So does whatever shows that a member and
    # this coordinator no longer mean the same: a connection made anew, a worker that has left the training too early.
    # Another coordinator may even have gone on with other members: then this one begins again.
    allow(RUNNING, (K.REGISTERED,), P.RECOLLECTING, P.TRAINING)
    allow(RUNNING, (K.REGISTERED, K.GONE, K.LOST, K.TICK, K.FINISHED), *_AFTER_LOSS)
    allow((P.REBUILDING, P.RESTORING), (K.RESTORE_FAILED,), *_AFTER_LOSS)
    # A verdict comes when it comes. It may take a node's place away, also when a spare for it has become ready.
    allow((P.RECOLLECTING,), (K.JUDGED,))
    allow(RUNNING, (K.JUDGED, K.BUILT), *_AFTER_LOSS)
    # A recovery. A spare's answer to the fence may come later, and its loss may be all that the plan still waits for.
    allow(RUNNING, (K.FENCED,))
    allow((P.FENCING,), (K.FENCED, K.GONE, K.TICK), P.REBUILDING, P.WAITING, P.STOPPED)
    allow((P.REBUILDING,), (K.CONNECTED,), P.RESTORING)
    allow((P.REBUILDING,), (K.READY,))
    allow((P.RESTORING,), (K.READY,), P.REDOING)
    allow((P.REDOING,), (K.HEARTBEAT,), P.TRAINING)
    # A node that has to leave: all halt, and it is replaced, or a checkpoint is written, and it goes without.
    allow((P.RECOLLECTING, *TRAINS), (K.HALTED,))
    allow((P.TRAINING,), (K.HALTED, K.CHECKPOINT_COMMITTED), *_AFTER_LOSS)
    # Nobody came: what is left is on storage, and the job goes on with fewer nodes or ends.
    allow((P.WAITING,), (K.CHECKPOINT_COMMITTED,), P.FENCING, P.STOPPED)
    return table


TRANSITIONS = _table()

KINDS: Mapping[type, Kind] = {
    m.Register: Kind.REGISTERED,
    m.Heartbeat: Kind.HEARTBEAT,
    m.WorkerBuilt: Kind.BUILT,
    m.WorkerLost: Kind.LOST,
    m.WorkerTrouble: Kind.TROUBLE,
    m.NodeFenced: Kind.FENCED,
    m.WorkerConnected: Kind.CONNECTED,
    m.WorkerReady: Kind.READY,
    m.WorkerFinished: Kind.FINISHED,
    m.RestoreFailed: Kind.RESTORE_FAILED,
    m.CheckpointShard: Kind.SHARD_DURABLE,
    m.CheckpointCommitted: Kind.CHECKPOINT_COMMITTED,
    m.SnapshotsPaced: Kind.PACED,
    m.WorkerRaised: Kind.RAISED,
    m.NodeDraining: Kind.DRAINING,
    m.WorkerHalted: Kind.HALTED,
    m.StateCompared: Kind.COMPARED,
    NodeGone: Kind.GONE,
    Tick: Kind.TICK,
    StopAsked: Kind.STOP_ASKED,
    Judged: Kind.JUDGED,
}
"""What each message and event is in the table."""
