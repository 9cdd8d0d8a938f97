"""Evidence from JSON: torchrun's error files, and what ``kubectl get … -o json`` and Slurm's ``--json`` print.

Each fact becomes a line as the text form of the same tool words it, so that the rules for the text apply; what the text form
does not say (node, time, exit code) is added as fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hotswap.diagnosis.decode import decode
from hotswap.diagnosis.model import Evidence, Value
from hotswap.diagnosis.prefixes import read_label

TEXT_CHARS_MAX = 4096
DEPTH_MAX = 4
"""Lists of lists that are followed; nobody nests them deeper."""


def read_structured(content: bytes, *, source: str) -> list[Evidence] | None:
    """What a JSON document says is wrong; None if *content* is no document, or none that is known."""
    try:
        data: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    item = _map(data)
    if "apiVersion" in item or "items" in item:
        found = _of_kubernetes(item, 0)
    elif "jobs" in item or "nodes" in item:
        found = _of_slurm(item)
    elif "message" in item:
        found = _of_torchrun(item)
    else:
        return None
    return [_numbered(one, number, source) for number, one in enumerate(found)]


def _numbered(one: Evidence, number: int, source: str) -> Evidence:
    return Evidence(
        kind=one.kind,
        source=source,
        node=one.node,
        time=one.time,
        order=2 * number,
        text=one.text,
        facts=one.facts,
        count=one.count,
    )


def _line(text: str, *, node: str | None = None, when: object = None, count: int = 1) -> Evidence:
    text = " ".join(text.split())[:TEXT_CHARS_MAX]
    kind, facts = decode(text)
    return Evidence(kind=kind, node=node, time=_time(when), text=text, facts=facts, count=count)


def _time(when: object) -> float | None:
    if isinstance(when, (int, float)) and when > 0:
        return float(when)
    return read_label(f"{when} x", year=1970).time if isinstance(when, str) else None


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


# --- torchrun -------------------------------------------------------------------------------------------------------


def _of_torchrun(item: Mapping[str, Any]) -> Iterator[Evidence]:
    """``{"message": {"message": "ValueError: …", "extraInfo": {"py_callstack": …, "timestamp": "…"}}}``."""
    message = item["message"]
    extra: Mapping[str, Any] = {}
    if isinstance(message, dict):
        extra = _map(message.get("extraInfo"))
        message = message.get("message", "")
    try:
        when = float(extra["timestamp"])
    except (KeyError, TypeError, ValueError):
        when = None
    for line in str(message).splitlines() or [""]:
        kind, facts = decode(line)
        yield Evidence(kind=kind, time=when, text=line[:TEXT_CHARS_MAX], facts=facts)


# --- Kubernetes -----------------------------------------------------------------------------------------------------


def _of_kubernetes(data: object, depth: int) -> Iterator[Evidence]:
    item = _map(data)
    kind = _word(item.get("kind"))
    if kind.endswith("List") or ("items" in item and not kind):
        for one in _list(item.get("items")) if depth < DEPTH_MAX else []:
            yield from _of_kubernetes(one, depth + 1)
    elif kind == "Pod":
        yield from _of_pod(item)
    elif kind == "Node":
        yield from _of_node(item)
    elif kind == "Event":
        yield from _of_event(item)
    elif "apiVersion" in item:
        yield from _conditions(_map(item.get("status")), None, wanted=("Failed", "Suspended"))


def _of_pod(pod: Mapping[str, Any]) -> Iterator[Evidence]:
    status = _map(pod.get("status"))
    node = _word(_map(pod.get("spec")).get("nodeName")) or None
    if status.get("reason"):
        yield _line(
            f"reason: {status['reason']} {_word(status.get('message'))}", node=node, when=status.get("startTime")
        )
    yield from _conditions(status, node, wanted=("DisruptionTarget",))
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in map(_map, _list(status.get(group))):
            yield from _of_container(container, node)


def _of_container(container: Mapping[str, Any], node: str | None) -> Iterator[Evidence]:
    name = _word(container.get("name"))
    for when in ("lastState", "state"):
        states = _map(container.get(when))
        waiting, ended = _map(states.get("waiting")), _map(states.get("terminated"))
        if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
            yield _line(
                f"container {name} waits, reason: {waiting['reason']} {_word(waiting.get('message'))}", node=node
            )
        if ended and ended.get("reason") != "Completed":
            yield from _of_end(name, ended, node)


def _of_end(name: str, ended: Mapping[str, Any], node: str | None) -> Iterator[Evidence]:
    """A container that has ended: why, as the cluster says; how, as the process did; and its last words."""
    reason, when = _word(ended.get("reason")), ended.get("finishedAt")
    if reason not in ("", "Error"):
        yield _line(f"container {name} ended, reason: {reason}", node=node, when=when)
    code = ended.get("exitCode")
    if isinstance(code, int) and code != 0:
        facts: dict[str, Value] = {"signal": code - 128} if code > 128 else {"code": code}
        text = f"container {name} ended with exit code {code}"
        yield Evidence(kind="exit", node=node, time=_time(when), text=text, facts=facts)
    for line in _word(ended.get("message")).splitlines():
        yield _line(line, node=node, when=when)


def _of_node(item: Mapping[str, Any]) -> Iterator[Evidence]:
    node = _word(_map(item.get("metadata")).get("name")) or None
    yield from _conditions(_map(item.get("status")), node)
    for taint in map(_map, _list(_map(item.get("spec")).get("taints"))):
        yield _line(f"taint {taint.get('key')}:{taint.get('effect')}", node=node, when=taint.get("timeAdded"))


def _conditions(status: Mapping[str, Any], node: str | None, *, wanted: tuple[str, ...] = ()) -> Iterator[Evidence]:
    """Conditions that are not as they should be: ``Ready`` must be true, all others of a node false."""
    for condition in map(_map, _list(status.get("conditions"))):
        kind, holds = _word(condition.get("type")), condition.get("status")
        if (wanted and kind not in wanted) or (holds == "True") is (kind == "Ready"):
            continue
        if holds == "Unknown" and kind != "Ready":
            continue
        said = f"{'NodeNotReady' if kind == 'Ready' else kind} reason: {condition.get('reason')} {_word(condition.get('message'))}"
        yield _line(said, node=node, when=condition.get("lastTransitionTime"))


def _of_event(event: Mapping[str, Any]) -> Iterator[Evidence]:
    if event.get("type") == "Normal" and event.get("reason") not in _NORMAL_NEWS:
        return
    about = _map(event.get("involvedObject") or event.get("regarding"))
    host = _word(_map(event.get("source")).get("host")) or _word(event.get("reportingInstance"))
    node = _word(about.get("name")) if about.get("kind") == "Node" else host
    when = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    count = event.get("count")
    yield _line(
        f"{event.get('reason')}: {_word(event.get('message') or event.get('note'))}",
        node=node or None,
        when=when,
        count=count if isinstance(count, int) and count > 0 else 1,
    )


_NORMAL_NEWS = (
    "NodeNotReady",
    "Preempted",
    "Preempting",
    "TaintManagerEviction",
    "Shutdown",
    "NodeShutdown",
    "RemovingNode",
)
"""Events that are called normal, but end pods."""


# --- Slurm ----------------------------------------------------------------------------------------------------------


def _of_slurm(item: Mapping[str, Any]) -> Iterator[Evidence]:
    """``sacct --json``, ``squeue --json``, ``scontrol show nodes --json``, as the text forms word it."""
    for job in map(_map, _list(item.get("jobs"))):
        state = job.get("state", job.get("job_state"))
        reason = _word(_map(state).get("reason")) or _word(job.get("state_reason"))
        for name in _names(_map(state).get("current") if isinstance(state, dict) else state):
            yield _line(f"JobState={name} Reason={reason}", when=_map(job.get("time")).get("end"))
    for node in map(_map, _list(item.get("nodes"))):
        states = "+".join(_names(node.get("state")))
        yield _line(f"State={states} Reason={_word(node.get('reason'))}", node=_word(node.get("name")) or None)


def _names(value: object) -> Iterable[str]:
    return [value] if isinstance(value, str) else [one for one in _list(value) if isinstance(one, str)]
