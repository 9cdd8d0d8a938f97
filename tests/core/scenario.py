"""A small language for scenarios: what happens to a coordinator, and, printed below each line, what it does about it.

Lines that begin with ``>`` are inputs, indented lines are effects, the rest is prose. Nodes are written without the
incarnation when it is the first (``n1`` is ``n1#1``). ``docs`` of the inputs: ``Scenario.INPUTS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import (
    Advice,
    Disconnect,
    Effect,
    Event,
    Exit,
    FromNode,
    Judged,
    NodeGone,
    Record,
    Send,
    StopAsked,
    Tick,
)
from hotswap.core.keep import GroupState
from hotswap.core.past import Past, recall
from hotswap.core.progress import GroupProgress, Progress
from hotswap.core.types import Endpoint, Generation, Held, HeldKind, NodeId, Slot, Source, Step, Suspicion, WorkerState

OLD_LOG: list[dict[str, object]] = [{"event": "recovery_planned", "generation": 1, "resume_step": 0}]


def full(name: str) -> NodeId:
    return name if "#" in name else f"{name}#1"


def short(node: NodeId) -> str:
    return node.removesuffix("#1")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


class Scenario:
    """Runs a transcript's inputs against a real coordinator and prints it again with the effects it has now."""

    def __init__(self, text: str) -> None:
        self.lines = [line for line in text.splitlines() if not line.startswith("    ")]
        self.now = 100.0
        self.limits = Limits(nodes_active=1, nodes_max=1, width=1)
        self.machine = Coordinator(self.limits, self.now)
        self.holders: dict[Slot, tuple[NodeId, ...]] = {}
        self.registered: list[NodeId] = []
        self.steps: dict[Slot, Step] = {}
        self.clean: set[Slot] = set()
        self.log: list[dict[str, object]] = []

    def run(self) -> str:
        out: list[str] = []
        for line in self.lines:
            out.append(line)
            if line.startswith("> "):
                before = self.machine.phase
                effects = list(self._input(line[2:].split(" -- ")[0].strip()))
                out.extend(f"    {text}" for text in describe(effects))
                if self.machine.phase is not before:
                    out.append(f"    == {self.machine.phase.value}")
        return "\n".join(out) + "\n"

    # --- inputs ----------------------------------------------------------------------------------------------------

    def _input(self, line: str) -> Iterable[Effect]:
        words = line.split()
        if words[0] == "job":
            return self._job(words[1:])
        if line.startswith("coordinator restarts"):
            logs = {"with the log": self.log, "with an empty log": [], "with an old log": OLD_LOG}
            past = next((recall(log) for words, log in logs.items() if line.endswith(words)), Past())
            past = replace(past, floor=int(words[-1]) if line.endswith(f"numbers from {words[-1]}") else 0)
            self.machine = Coordinator(self.limits, self.now, past)
            return []
        if words[0] == "tick":
            self.now = self.now + float(words[1]) if len(words) > 1 else self.machine.deadline()
            return self._handle(Tick())
        if words[0] == "after":
            self.now += float(words[1])
            return self._input(" ".join(words[2:]))
        if words[0] == "stop":
            return self._handle(StopAsked(exit_code=int(words[1]), reason=" ".join(words[2:])))
        if words[0] == "verdict":
            return self._handle(_judged(words[1], words[2], " ".join(words[3:])))
        if words[0] == "quietly":
            list(self._input(" ".join(words[1:])))
            return []
        if words[0] == "all":
            return [effect for node in self._everyone(words[1]) for effect in self._node(node, words[1:])]
        return [effect for name in words[0].split(",") for effect in self._node(full(name), words[1:])]

    def _job(self, words: list[str]) -> Iterable[Effect]:
        values = dict(word.split("=") for word in words if "=" in word)
        self.limits = replace(self.limits, **{key: type(getattr(self.limits, key))(v) for key, v in values.items()})
        self.machine = Coordinator(self.limits, self.now)
        if "trains" not in words:
            return []
        names = [f"n{number}" for number in range(1, self.limits.nodes_max + 1)]
        for name in names:
            self._input(f"{name} registers")
        for name in names:
            self._input(f"{name} builds")
        for what in ("fenced", "connected", "ready", "acked 1"):
            self._input(f"all {what}")
        return [effect for effect in self._input("all acked 5") if isinstance(effect, Record)]

    def _everyone(self, verb: str) -> list[NodeId]:
        """Members first, as the answers of spares matter less; only the fence is answered by spares as well."""
        assert self.machine.membership is not None
        places = [node for node in self.machine.membership.places if node in self.registered]
        spares = [node for node in self.registered if node not in places]
        return [*spares, *places] if verb == "fenced" else places

    def _node(self, node: NodeId, words: list[str]) -> Iterable[Effect]:
        verb, rest = words[0], words[1:]
        values = dict(word.split("=", 1) for word in rest if "=" in word)
        plain = [word for word in rest if "=" not in word]
        if verb == "gone":
            self.registered = [other for other in self.registered if other != node]
            return self._handle(NodeGone(node=node, reason=" ".join(plain) or "connection closed"))
        generation = int(values.get("gen", self._generation()))
        made = getattr(self, f"_{verb}")(node, generation, plain, values)
        return [effect for message in made for effect in self._handle(FromNode(node=node, message=message))]

    def _registers(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        if node not in self.registered:
            self.registered.append(node)
        generation = int(values.get("gen", 0))
        yield m.Register(
            node=node,
            fault_domain=values.get("domain", ""),
            endpoint=Endpoint(host=short(node), port=1),
            generation=generation,
            places=tuple(full(name) for name in values.get("places", "").split(",") if name),
            planned="planned" in plain,
            training="training" in plain,
            built=tuple(self._model(slot, generation) for slot in numbers(values.get("built", ""))),
            acked={int(slot): int(step) for slot, step in re.findall(r"(\d+)@(\d+)", values.get("acked", ""))},
            lost=tuple(numbers(values.get("lost", ""))),
            finished=tuple(numbers(values.get("finished", ""))),
            peers={int(a): (int(b),) for a, b in re.findall(r"(\d+):(\d+)", values.get("peers", ""))},
            leaves_in_s=float(values["leaves"]) if "leaves" in values else None,
            plans=tuple((int(a), int(b)) for a, b in re.findall(r"(\d+)@(\d+)", values.get("plans", ""))),
            size_since=int(values.get("size", 0)),
        )

    def _builds(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        slots = [int(word) for word in plain] or self._slots(node) or list(range(self.limits.width))
        for slot in slots:
            yield self._model(slot, generation, numbers(values.get("peers", "")))

    def _model(self, slot: Slot, generation: Generation, peers: Iterable[Slot] = ()) -> m.WorkerBuilt:
        return m.WorkerBuilt(slot=slot, generation=generation, shape="s", peers=tuple(peers))

    def _acked(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        slots = self._slots(node)
        if generation == self._generation():
            self.steps.update(dict.fromkeys(slots, int(plain[0])))
        yield m.Heartbeat(generation=generation, acked=dict.fromkeys(slots, int(plain[0])))

    def _reports(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        """``0@5:script:dp[0/1]4``: slot, step, phase, group, its members, operations; ``!`` inside of one, ``~`` mute."""
        pattern = r"(\d+)@(\d+):(\w+):(\w+)\[([\d/]+)\](\d+)(!?)(~?)"
        progress = {}
        for slot, step, phase, key, members, issued, waits, mute in re.findall(pattern, " ".join(plain)):
            group = GroupProgress(members=tuple(map(int, members.split("/"))), issued=int(issued))
            progress[int(slot)] = Progress(
                step=int(step),
                phase=phase,
                issued=int(issued),
                gate=int(step),
                waits=bool(waits),
                at=f"train.py:7 {phase}",
                groups={key: group},
                mute_s=9.0 if mute else 0.1,
            )
        yield m.Heartbeat(generation=generation, progress=progress)

    def _fenced(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        """Without details: own snapshots, replicas and workers as they are after the last ``acked`` step."""
        if not plain and not (values.keys() - {"gen", "checkpoint", "reaches_not", "suspect"}):
            values = {**self._usual(node), **values}
        elif plain == ["empty"]:
            plain = []
        held = [
            Held(slot=int(slot), step=int(step), kind=kind, unique_nbytes=8, shared_nbytes=int(shared or 0))
            for kind in HeldKind
            for slot, step, shared in re.findall(r"(\d+)@(\d+)(?:\+shared(\d+))?", values.get(kind.value, ""))
        ]
        workers = [
            WorkerState(slot=int(slot), step=int(step), dirty="dirty" in flags, torn="torn" in flags)
            for slot, step, flags in re.findall(r"(\d+)@(\d+)([a-z-]*)", values.get("live", ""))
        ]
        groups: dict[Slot, dict[str, GroupState]] = {}
        for slot, key, members, issued in re.findall(r"(\d+):(\w+)\[([\d/]+)\](\d+)", values.get("groups", "")):
            state = GroupState(members=tuple(map(int, members.split("/"))), issued=int(issued), intact=True)
            groups.setdefault(int(slot), {})[key] = state
        checkpoint = int(values["checkpoint"]) if "checkpoint" in values else None
        yield m.NodeFenced(
            generation=generation,
            held=tuple(held),
            workers=tuple(workers),
            groups=groups,
            checkpoint_step=checkpoint,
            unreachable=tuple(full(name) for name in values.get("reaches_not", "").split(",") if name),
            suspicion=self._suspicion(values.get("suspect", "")),
        )

    def _suspicion(self, text: str) -> Suspicion | None:
        """``4:0/1``: after step 4, of slots 0 and 1."""
        verified, _, odd = text.partition(":")
        return Suspicion(verified=int(verified), odd=tuple(map(int, odd.split("/")))) if text else None

    def _compared(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.StateCompared(
            slot=int(plain[0]),
            generation=generation,
            step=int(plain[1]),
            verified=int(values.get("verified", plain[1])),
            odd=tuple(numbers(values.get("odd", ""))),
            undecided=tuple(numbers(values.get("undecided", ""))),
            detail=values.get("detail", ""),
        )

    def _usual(self, node: NodeId) -> dict[str, str]:
        assert self.machine.membership is not None
        attempt = self.machine.job.recovery
        lost = attempt.lost if attempt is not None else frozenset()
        fresh = {self.machine.membership.node_of(slot) for slot in lost} - {
            node for nodes in self.holders.values() for node in nodes
        }
        own = [slot for slot in self._slots(node) if slot in self.steps and node not in fresh]
        kept = [slot for slot, holder in self.holders.items() if node in holder and slot in self.steps]

        def versions(slots: list[Slot]) -> str:
            return ",".join(f"{slot}@{step}" for slot in slots for step in (self.steps[slot] - 1, self.steps[slot]))

        state = {slot: f"{slot}@{self.steps[slot]}{'' if slot in self.clean else '-dirty'}" for slot in own}
        live = ",".join(state[slot] for slot in own if slot not in lost)
        return {"own": versions([s for s in own if s not in lost or kept]), "replica": versions(kept), "live": live}

    def _connected(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        for slot in map(int, plain or map(str, self._slots(node))):
            yield m.WorkerConnected(slot=slot, generation=generation)

    def _ready(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        for slot in map(int, plain or map(str, self._slots(node))):
            yield m.WorkerReady(slot=slot, generation=generation)

    def _finished(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        for slot in map(int, plain or map(str, self._slots(node))):
            yield m.WorkerFinished(slot=slot, generation=generation)

    def _loses(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        status = int(values.get("status", "-9"))
        yield m.WorkerLost(slot=int(plain[0]), generation=generation, status=status, detail=" ".join(plain[1:]))

    def _troubled(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.WorkerTrouble(slot=int(plain[0]), generation=generation, detail=" ".join(plain[1:]))

    def _fails(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.RestoreFailed(slot=int(plain[0]), generation=generation, detail=" ".join(plain[1:]))

    def _writes(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        for slot, step in re.findall(r"(\d+)@(\d+)", " ".join(plain)):
            yield m.CheckpointShard(slot=int(slot), step=int(step), generation=generation)

    def _raises(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.WorkerRaised(slot=int(plain[0]), generation=generation, error=" ".join(plain[1:]))

    def _paces(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.SnapshotsPaced(slot=int(plain[0]), generation=generation, step=int(plain[1]), interval=int(plain[2]))

    def _drains(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.NodeDraining(leaves_in_s=float(plain[0]), reason=" ".join(plain[1:]) or "told to")

    def _halted(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        """At a step, which is acknowledged: with nothing under way, live workers stand there untouched."""
        slots = numbers(values["slots"]) if "slots" in values else self._slots(node)
        self.steps.update(dict.fromkeys(slots, int(plain[0])))
        self.clean.update(slots)
        for slot in slots:
            yield m.WorkerHalted(slot=slot, generation=generation, step=int(plain[0]))

    def _commits(
        self, node: NodeId, generation: Generation, plain: list[str], values: dict[str, str]
    ) -> Iterator[m.FromAgent]:
        yield m.CheckpointCommitted(step=int(plain[0]))

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _generation(self) -> Generation:
        return self.machine.membership.generation if self.machine.membership is not None else 0

    def _slots(self, node: NodeId) -> list[Slot]:
        return list(self.machine.membership.slots_of(node)) if self.machine.membership is not None else []

    def _handle(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Record):
                self.log.append({"event": effect.event, **effect.fields})
            if isinstance(effect, Send) and isinstance(effect.message, m.Plan):
                self.holders = effect.message.holders
                self.steps = dict.fromkeys(effect.message.sources, effect.message.resume_step)
                self.clean.clear()
        return effects


def _judged(advice: str, of: str, reason: str) -> Judged:
    """*of*: a host, or for ``give-up`` a slot."""
    kind = Advice(advice.replace("-", " "))
    return (
        Judged(advice=kind, slot=int(of), reason=reason)
        if kind is Advice.GIVE_UP
        else Judged(advice=kind, host=of, reason=reason)
    )


# --- printing --------------------------------------------------------------------------------------------------------


def describe(effects: list[Effect]) -> Iterator[str]:
    """One line an effect; equal messages to several nodes in a row share one."""
    for text, group in groupby(
        effects, key=lambda effect: _message(effect.message) if isinstance(effect, Send) else ""
    ):
        members = list(group)
        if text:
            yield f"{' '.join(short(effect.node) for effect in members if isinstance(effect, Send))} <- {text}"
        else:
            yield from map(_other, members)


def _other(effect: Effect) -> str:
    if isinstance(effect, Record):
        fields = {key: value for key, value in effect.fields.items() if key != "generation"}
        return f"* {effect.event} {' '.join(f'{key}={_value(value)}' for key, value in fields.items())}".rstrip()
    if isinstance(effect, Disconnect):
        return f"{short(effect.node)} is disconnected: {effect.reason}"
    assert isinstance(effect, Exit)
    return f"exit {effect.exit_code}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}:{_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + " ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    text = re.sub(r"(\w+)#1\b", r"\1", str(value))
    return f'"{text}"' if " " in text else text


def _message(message: m.ToAgent) -> str:
    if isinstance(message, m.Fence):
        return _fence(message)
    if isinstance(message, m.Plan):
        return _plan(message)
    if isinstance(message, m.Go):
        return f"Go {message.generation}"
    if isinstance(message, m.Agreed):
        return f"Agreed {message.generation} step {message.step}"
    if isinstance(message, m.Stop):
        return f"Stop {message.exit_code}: {_value(message.reason)}"
    if isinstance(message, m.EndHung):
        return f"EndHung {message.slot}: {message.reason}"
    if isinstance(message, m.Halt):
        return f"Halt {message.generation}{' with a durable checkpoint' if message.durable else ''}"
    if isinstance(message, m.Salvage):
        sources = " ".join(f"{slot}:{_source(source)}" for slot, source in message.sources.items())
        return f"Salvage {message.generation} step {message.step} from {sources}"
    if isinstance(message, m.CheckNode):
        return f"CheckNode: {message.reason}"
    assert isinstance(message, m.CommitCheckpoint)
    return f"CommitCheckpoint of step {message.step}"


def _fence(fence: m.Fence) -> str:
    text = f"Fence {fence.generation} [{' '.join(map(short, fence.places))}]"
    if fence.lost:
        text += f" lost {','.join(map(str, fence.lost))}"
    if fence.size_since:
        text += f" of this size since {fence.size_since}"
    if fence.positions:
        text += f" build for {','.join(map(str, fence.positions))}"
    if fence.probe:
        text += " who reaches whom?"
    if fence.valid_to is not None:
        text += f" drop all beyond {fence.valid_to}" if fence.valid_to >= 0 else " drop everything"
    return text


def _plan(plan: m.Plan) -> str:
    sources = " ".join(f"{slot}:{_source(source)}" for slot, source in plan.sources.items())
    holders = " ".join(f"{slot}>{'+'.join(map(short, nodes))}" for slot, nodes in plan.holders.items())
    text = f"Plan {plan.generation} resume {plan.resume_step} from {sources}; hold {holders or 'nowhere'}"
    if plan.push:
        partly = {
            s: "" if nodes == plan.holders[s] else f">{'+'.join(map(short, nodes))}" for s, nodes in plan.push.items()
        }
        text += f"; push {','.join(f'{slot}{to}' for slot, to in partly.items())}"
    if plan.keep:
        text += f"; keep {','.join(plan.keep)}"
    return text


def _source(source: Source) -> str:
    if not source.unique_from:
        return source.kind.value
    shared = f"+{source.shared_slot}@{short(source.shared_from)}" if source.shared_from else ""
    return f"{source.kind.value}@{short(source.unique_from)}{shared}"
