"""What is done about a verdict: one table, and the history that moves an answer up the ladder when a fault comes back.

Pure: the caller says what time it is. What is remembered about nodes is bounded and fades.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from hotswap.diagnosis.model import Blames, Diagnosis, Verdict


class Action(str, Enum):
    """What is done, from the cheapest to the most expensive."""

    CONTINUE = "continue"
    """Nothing but keep counting."""
    RETRY = "retry"
    """Go on from the resume step on the same nodes and processes."""
    RESPAWN = "respawn"
    """A new process on the same node."""
    CHECK = "restart_with_health_check"
    """Restart, and trust the suspected nodes only after their probes passed. The careful action."""
    REPLACE = "replace_node"
    """A spare takes the node's place. If its fault is proven or has come back, the node is quarantined as well."""
    ROLL_BACK = "roll_back"
    """Go on from the checkpoint before the numbers went wrong."""
    REQUEUE = "checkpoint_and_requeue"
    """Nothing is broken; the job goes on elsewhere or later."""
    STOP = "stop_with_report"
    """Every further attempt would fail in the same way; a person is needed."""


LADDERS: Mapping[Verdict, tuple[Action, ...]] = MappingProxyType(
    {
        Verdict.TRANSIENT: (Action.RETRY, Action.RETRY, Action.CHECK, Action.REPLACE),
        Verdict.PROCESS_FAULT: (Action.RESPAWN, Action.CHECK, Action.REPLACE),
        Verdict.NODE_FAULT: (Action.REPLACE,),
        Verdict.USER_ERROR: (Action.STOP,),
        Verdict.STORAGE: (Action.RETRY, Action.RETRY, Action.STOP),
        Verdict.OOM_GPU: (Action.STOP,),
        Verdict.OOM_HOST: (Action.RESPAWN, Action.STOP),
        Verdict.PREEMPTION: (Action.REQUEUE,),
        Verdict.NUMERICAL: (Action.ROLL_BACK, Action.ROLL_BACK, Action.STOP),
        Verdict.UNKNOWN: (Action.CHECK, Action.REPLACE),
    }
)
"""For each verdict, what is done the first time, the second time, and so on; the last step repeats."""

NEVER_A_NODE = frozenset({Verdict.USER_ERROR, Verdict.OOM_GPU, Verdict.NUMERICAL, Verdict.PREEMPTION, Verdict.STORAGE})
"""Verdicts for which no node is ever replaced, however often they come."""

RETURNED = 0.75
"""From so many earlier faults on, as they count now, the same one has come back."""

JOB = ""
"""Where faults are counted whose node is not known."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How long faults are held against a node, and how many may be remembered."""

    half_life_s: float = 24 * 3600.0
    """After this time a fault counts half. Too short and a node that fails once a day is trusted for ever."""
    nodes_max: int = 4096
    """Nodes remembered; the least burdened are forgotten first."""
    quarantine_s: float = 7 * 24 * 3600.0
    """How long a replaced node stays out unless a person lets it back."""
    quarantined_max: int = 256
    """Nodes in quarantine; more at once is a common cause, not that many bad nodes, so no more are added."""

    def __post_init__(self) -> None:
        """Relations that must hold."""
        for name in ("half_life_s", "nodes_max", "quarantine_s", "quarantined_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, not above 0")


@dataclass(frozen=True, kw_only=True)
class Burden:
    """What is held against a node: faults with their decay, as of ``time`` (seconds since the epoch)."""

    faults: float
    time: float

    def at(self, now: float, half_life_s: float) -> float:
        """The faults as they count now. A clock that went back does not make them more."""
        return float(self.faults * 0.5 ** (max(0.0, now - self.time) / half_life_s))


@dataclass(frozen=True, kw_only=True)
class History:
    """Faults of each (node, verdict), and which nodes are out until when. Immutable: each step gives the next one."""

    burdens: Mapping[tuple[str, Verdict], Burden] = field(default_factory=dict)
    quarantined: Mapping[str, float] = field(default_factory=dict)

    def is_quarantined(self, node: str, now: float) -> bool:
        """Whether *node* must not be used."""
        return self.quarantined.get(node, float("-inf")) > now

    def faults_of(self, node: str, now: float, config: PolicyConfig) -> float:
        """All faults of *node* as they count now."""
        return sum(one.at(now, config.half_life_s) for (name, _), one in self.burdens.items() if name == node)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, on which node, why, and the history from here on."""

    action: Action
    node: str | None
    reason: str
    history: History


def decide(diagnosis: Diagnosis, history: History, now: float, config: PolicyConfig | None = None) -> Decision:
    """The action for *diagnosis*, given what happened before. ``now`` in seconds since the epoch.

    A node is replaced only on a confident verdict that names it, or when an uncertain fault returns to the same node.
    """
    config = config or PolicyConfig()
    node = blamed_node(diagnosis)
    before = _faults_before(diagnosis.verdict, node, history, now, config)
    ladder = LADDERS[diagnosis.verdict]
    action = ladder[min(int(before + 0.25), len(ladder) - 1)]
    action, why = _careful(action, diagnosis, node, before)
    after = _counted(history, node, diagnosis.verdict, now, config)
    if action is Action.REPLACE and node is not None and (diagnosis.proven or before >= RETURNED):
        after = _quarantine(after, node, now, config)
    return Decision(action=action, node=node, reason=why, history=after)


def blamed_node(diagnosis: Diagnosis) -> str | None:
    """The node that would be replaced, if a node is to blame at all."""
    if diagnosis.culprit.kind in (Blames.CODE, Blames.NOBODY, Blames.STORAGE):
        return None
    if diagnosis.culprit.kind is Blames.PEER:
        return diagnosis.culprit.peer
    return diagnosis.culprit.node


def _faults_before(verdict: Verdict, node: str | None, history: History, now: float, config: PolicyConfig) -> float:
    burden = history.burdens.get((node or JOB, verdict))
    return burden.at(now, config.half_life_s) if burden else 0.0


def _careful(action: Action, diagnosis: Diagnosis, node: str | None, before: float) -> tuple[Action, str]:
    """Takes a node away only if it is named, and at the first time only if the verdict is sure."""
    if action is not Action.REPLACE:
        if action is Action.STOP and not diagnosis.confident and before < RETURNED:
            return Action.CHECK, "not sure enough to stop: one restart with a health check"
        return action, f"{diagnosis.verdict.value}, seen {before:.1f} times before"
    if node is None:
        return Action.CHECK, "no node is named: all are checked before they are trusted again"
    if diagnosis.verdict is Verdict.NODE_FAULT and not diagnosis.confident and before < RETURNED:
        return Action.CHECK, "suspected, not proven: one restart with a health check, replaced when it returns"
    return action, f"{diagnosis.verdict.value} of {node}, seen {before:.1f} times before"


def _counted(history: History, node: str | None, verdict: Verdict, now: float, config: PolicyConfig) -> History:
    key = (node or JOB, verdict)
    old = history.burdens.get(key)
    faults = (old.at(now, config.half_life_s) if old else 0.0) + 1.0
    burdens = {**history.burdens, key: Burden(faults=faults, time=now)}
    if len(burdens) > config.nodes_max:
        lightest = min((one for one in burdens if one != key), key=lambda one: burdens[one].at(now, config.half_life_s))
        del burdens[lightest]
    return History(burdens=burdens, quarantined=history.quarantined)


def _quarantine(history: History, node: str, now: float, config: PolicyConfig) -> History:
    out = {name: until for name, until in history.quarantined.items() if until > now}
    if node in out or len(out) < config.quarantined_max:
        out[node] = now + config.quarantine_s
    return History(burdens=history.burdens, quarantined=out)


def release(history: History, node: str) -> History:
    """A person or a passed check lets *node* back; its faults are still remembered."""
    return History(
        burdens=history.burdens,
        quarantined={name: until for name, until in history.quarantined.items() if name != node},
    )
