"""All transitions of the job in one table. A pair that is not in it is an error: it changes nothing and is reported.

``docs/protocol.md`` draws its diagrams from this table.
"""

from __future__ import annotations

from enum import Enum


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
    TICK = "time passed"
    STOP_ASKED = "stop asked"


P, K = Phase, Kind

_RUNNING = (P.FENCING, P.WAITING, P.REBUILDING, P.RESTORING, P.REDOING, P.TRAINING)
_AFTER_LOSS = frozenset({P.FENCING, P.WAITING, P.STOPPED})


def _table() -> dict[tuple[Phase, Kind], frozenset[Phase]]:
    """(phase, kind) -> the phases it may lead to; staying in the phase is always among them."""
    table: dict[tuple[Phase, Kind], frozenset[Phase]] = {}

    def allow(phases: tuple[Phase, ...], kind: Kind, *to: Phase) -> None:
        for phase in phases:
            table[phase, kind] = frozenset({phase, *to})

    everywhere = (P.FORMING, P.RECOLLECTING, *_RUNNING)
    allow(everywhere, K.HEARTBEAT)
    allow(everywhere, K.TICK, P.STOPPED)
    allow(everywhere, K.STOP_ASKED, P.STOPPED)
    allow(everywhere, K.GONE)
    allow(_RUNNING, K.REGISTERED)
    allow(_RUNNING, K.BUILT)
    allow((*_RUNNING, P.RECOLLECTING), K.SHARD_DURABLE)
    # forming a job, or learning from the agents what an earlier coordinator knew
    allow((P.FORMING,), K.REGISTERED, P.FENCING, P.RECOLLECTING, P.TRAINING, P.STOPPED)
    allow((P.FORMING,), K.TICK, P.FENCING, P.STOPPED)
    allow((P.RECOLLECTING,), K.REGISTERED, P.TRAINING, P.FENCING, P.WAITING, P.STOPPED)
    allow((P.RECOLLECTING,), K.TICK, P.TRAINING, *_AFTER_LOSS)
    for kind in (K.BUILT, K.LOST, K.TROUBLE, K.FINISHED, K.CONNECTED, K.READY, K.FENCED):
        allow((P.RECOLLECTING,), kind)
    # a loss, at any moment, fences and starts over with a higher generation
    for kind in (K.GONE, K.LOST, K.TICK):
        allow(_RUNNING, kind, *_AFTER_LOSS)
    allow(_RUNNING, K.TROUBLE)
    allow(_RUNNING, K.FENCED)
    allow((P.FENCING,), K.FENCED, P.REBUILDING, P.STOPPED)
    allow((P.WAITING,), K.REGISTERED, P.FENCING)
    allow((P.REBUILDING,), K.CONNECTED, P.RESTORING)
    allow((P.REBUILDING,), K.READY)
    allow((P.RESTORING,), K.READY, P.REDOING)
    allow((P.REBUILDING, P.RESTORING), K.RESTORE_FAILED, *_AFTER_LOSS)
    allow((P.REDOING,), K.HEARTBEAT, P.TRAINING)
    allow((P.TRAINING, P.REDOING), K.FINISHED, P.STOPPED)
    return table


TRANSITIONS = _table()
