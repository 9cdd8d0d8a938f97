"""What a job's events say, as a picture of the moment and as one sentence for each thing that happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class NodeView:
    """One node as the screen shows it."""

    role: str = "spare"
    slots: str = ""
    state: str = "up"


@dataclass(kw_only=True)
class JobView:
    """The picture of the moment. ``story`` grows by (seconds since start, sentence).

    ``step`` is the newest of which all *ranks* data-parallel ranks have told their loss, and ``loss`` the mean of those.
    """

    steps: int
    ranks: int = 1
    step: int = 0
    committed: int = 0
    loss: float | None = None
    generation: int = 0
    nodes: dict[str, NodeView] = field(default_factory=dict)
    story: list[tuple[float, str]] = field(default_factory=list)
    width: int = 1
    started_at: float | None = None
    _told: dict[int, dict[int, float]] = field(default_factory=dict)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in an event, a death or a record."""
        if event["event"] == "record":
            self._hear_loss(int(event["step"]), int(event["dp_rank"]), float.fromhex(event["loss"]))
            return
        if self.started_at is None:
            self.started_at = float(event["time"])
        self._picture(event)
        sentence = tell(event)
        if sentence and sentence not in {told for _, told in self.story[-1:]}:
            self.story.append((float(event["time"]) - self.started_at, sentence))

    def _hear_loss(self, step: int, rank: int, loss: float) -> None:
        told = self._told.setdefault(step, {})
        told[rank] = loss
        if len(told) == self.ranks:
            self.step, self.loss = step, sum(told.values()) / self.ranks
            self._told = {later: losses for later, losses in self._told.items() if later > step}

    def _picture(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        self.generation = max(self.generation, int(event.get("generation", 0)))
        if name == "job_started":
            self.width = int(event["width"])
            for node in event["nodes"]:
                self.nodes.setdefault(short(node), NodeView())
        elif name in ("node_joined", "spare_ready"):
            view = self.nodes.setdefault(short(event["node"]), NodeView())
            view.state = "ready" if name == "spare_ready" else "up"
        elif name == "node_lost":
            self.nodes.setdefault(short(event["node"]), NodeView()).state = "lost"
        elif name == "recovery_started":
            self._place([short(node) for node in event["places"]])
        elif name == "training_started":
            self._set_active("training")
        elif name == "step_committed":
            self.committed = int(event["step"])

    def _place(self, places: list[str]) -> None:
        for node, view in self.nodes.items():
            view.role, view.slots = ("spare", "") if view.state != "lost" else ("lost", "")
            if node in places:
                first = places.index(node) * self.width
                view.role = "active"
                view.slots = str(first) if self.width == 1 else f"{first}-{first + self.width - 1}"
        self._set_active("recovering" if self.generation > 1 else "starting")

    def _set_active(self, state: str) -> None:
        for view in self.nodes.values():
            if view.role == "active" and view.state != "lost":
                view.state = state


def short(node: str) -> str:
    """A node's name without its incarnation."""
    return node.split("#")[0]


def tell(event: Mapping[str, Any]) -> str | None:
    """One sentence for an event that a spectator should know of, None for the others."""
    first = int(event.get("generation", 0)) <= 1
    name = event["event"]
    if name in _ALWAYS:
        return _ALWAYS[name](event)
    if name in _AFTER_THE_START and not first:
        return _AFTER_THE_START[name](event)
    if name == "training_started" and first:
        return f"training starts at step {event['step']}"
    return None


def _death(event: Mapping[str, Any]) -> str:
    moments = (
        f" in {event['moment']} of step {event['step']}" if event["moment"] else f" with step {event['step']} committed"
    )
    what = {
        "worker": f"the worker of slot {event['slot']}",
        "node": f"the whole node of slot {event['slot']}",
        "spare": f"the spare {event.get('node', '')}",
        "coordinator": "the coordinator",
    }[event["kind"]]
    return f"kill -9: {what}{moments}"


def _promoted(event: Mapping[str, Any]) -> str:
    warmth = "its workers are built and rehearsed" if event.get("hot") else "its workers must be built first"
    return f"{short(event['node'])} takes the place of {short(event['replaces'])}; {warmth}"


def _done(event: Mapping[str, Any]) -> str:
    redone = int(event["redone_steps"])
    steps = f"{redone} step{'' if redone == 1 else 's'} redone"
    return f"the first new step is committed, {float(event['phases_ms']['total']):.0f} ms after the loss was noticed; {steps}"


_ALWAYS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "job_started": lambda e: (
        f"{len(e['nodes'])} nodes with {e['width']} workers each: {', '.join(short(n) for n in e['nodes'])}"
    ),
    "death": _death,
    "node_lost": lambda e: f"{short(e['node'])} is gone: {e['reason']}",
    "worker_lost": lambda e: f"the worker of slot {e['slot']} is gone: {e['detail']}",
    "spare_ready": lambda e: f"{short(e['node'])} is a hot spare now",
    "spare_promoted": _promoted,
    "waiting_for_node": lambda e: f"no spare left, waiting up to {e['wait_s']:g} s for a node",
    "job_resized": lambda e: f"it goes on with {e['now']} nodes instead of {e['before']}: {e['reason']}",
    "restore_failed": lambda e: f"slot {e['slot']} could not be restored: {e['detail']}",
    "restored_from_checkpoint": lambda e: (
        f"no copy in memory: going back to the durable checkpoint of step {e['step']}"
    ),
    "coordinator_started": lambda e: "a new coordinator has started" if e["restarted"] else None,
    "coordinator_took_over": lambda e: f"it has heard {e['members']} nodes and takes over",
    "job_stopped": lambda e: f"the end: {e['reason']}",
}
_AFTER_THE_START: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "recovery_started": lambda e: f"generation {e['generation']} begins: {e['cause']}",
    "recovery_planned": lambda e: f"every slot can be restored to step {e['resume_step']}",
    "recovery_done": _done,
}
