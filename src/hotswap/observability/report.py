"""``hotswap report``: a job's recoveries with their causes, from its event log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotswap.errors import EXIT_OK, UsageError

FRAMES_SHOWN = 3
PHASES = ("fence", "plan", "rebuild", "restore", "redo", "total")


@dataclass(kw_only=True)
class Recovery:
    """One answer to one or several losses. ``phases_ms`` counts from the moment the first of them was noticed."""

    generation: int
    cause: str
    lost: list[str] = field(default_factory=list)
    spares: list[str] = field(default_factory=list)
    resume_step: int | None = None
    redone_steps: int | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    """Of the workers that others waited for, by slot."""
    differing: list[str] = field(default_factory=list)
    """Slots that held another state than their peers."""
    diagnosis: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Report:
    """A whole job. ``pauses``: how often nobody advanced and nobody was waited for. ``exit_code`` is None while it runs, or if its coordinator was killed at the very end."""

    committed_step: int | None = None
    generation: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    pauses: int = 0
    slow: list[str] = field(default_factory=list)
    """Workers that took longer for their own part of a step than others."""
    exit_code: int | None = None
    reason: str = ""
    diagnosis: dict[str, Any] = field(default_factory=dict)
    """Of a loss that ended the job."""
    others: list[dict[str, Any]] = field(default_factory=list)
    """Verdicts that no recovery belongs to: on spares that were lost (``of``: spare), and on checks of nodes (check)."""
    turned_away: list[str] = field(default_factory=list)
    """Nodes that were proven broken, and why."""
    drills: list[str] = field(default_factory=list)
    """Faults that were ordered."""

    def as_json(self) -> dict[str, Any]:
        """Plain data; the field names are part of the interface."""
        return asdict(self)


def report_of(events: Iterable[Mapping[str, Any]]) -> Report:
    """The report of an event log. Several losses that one recovery answers are one recovery."""
    report = Report()
    current: Recovery | None = None
    for event in events:
        name = event.get("event")
        report.generation = max(report.generation, int(event.get("generation", 0)))
        if name == "step_committed":
            report.committed_step = int(event["step"])
        elif name in ("worker_lost", "node_lost") and event.get("role") != "spare":
            current = current or Recovery(generation=report.generation, cause="")
            current.lost.append(_loss(event))
        elif name == "recovery_started" and event["cause"] != "start":
            current = current or Recovery(generation=report.generation, cause="")
            current.generation, current.cause = int(event["generation"]), str(event["cause"])
        elif name == "hang_found":
            current = current or Recovery(generation=report.generation, cause="")
            current.hangs.append(str(event["why"]))
        elif name == "worker_stacks" and current is not None:
            current.stacks[str(event["slot"])] = str(event["stacks"])
        elif name == "all_paused":
            report.pauses += 1
        elif name == "slow_worker":
            report.slow.append(_slow(event))
        elif name == "state_differs":
            current = current or Recovery(generation=report.generation, cause="")
            current.differing.append(_difference(event))
        elif current is not None and name == "spare_promoted":
            current.spares.append(f"{event['node']} for {event['replaces']}")
        elif current is not None and name == "recovery_planned":
            current.resume_step = int(event["resume_step"])
        elif current is not None and name == "recovery_done":
            current.redone_steps, current.phases_ms = int(event["redone_steps"]), dict(event["phases_ms"])
            report.recoveries.append(current)
            current = None
        elif name == "node_turned_away":
            report.turned_away.append(str(event["reason"]))
        elif name == "drill":
            report.drills.append(_drill(event))
        elif name == "diagnosed":
            _place_diagnosis(report, current, event)
        elif name == "job_stopped":
            report.exit_code, report.reason = int(event["exit_code"]), str(event["reason"])
    if current is not None:
        report.recoveries.append(current)
    return report


def _loss(event: Mapping[str, Any]) -> str:
    if event["event"] == "node_lost":
        return f"node {event['node']}: {event['reason']}"
    return f"worker of slot {event['slot']} on {event['node']}: {event['detail']}"


def _slow(event: Mapping[str, Any]) -> str:
    times = f"{event['ms']:.0f} ms in '{event['part']}' where its peers take {event['peers_ms']:.0f} ms"
    return f"slot {event['slot']} on {event['node']} (generation {event['generation']}): {times}"


def _drill(event: Mapping[str, Any]) -> str:
    slot = f"slot {event['slot']} on " if event["slot"] >= 0 else ""
    whom = f"{slot}{event['node'] or 'the coordinator'}"
    return f"{event['fault']}: {whom} (generation {event['generation']}), {event['reason']}"


def _difference(event: Mapping[str, Any]) -> str:
    slots = ", ".join(map(str, event["odd"] or event["undecided"]))
    what = f" in {event['detail']}" if event["detail"] else ""
    return f"slot {slots} at step {event['step']}{what}; all agreed at step {event['verified']}"


def _place_diagnosis(report: Report, current: Recovery | None, event: Mapping[str, Any]) -> None:
    found = {key: value for key, value in event.items() if key not in ("time", "event", "generation")}
    if event.get("of", "recovery") != "recovery":
        report.others.append(found)
        return
    for recovery in report.recoveries:
        if recovery.generation == event["generation"] and not recovery.diagnosis:
            recovery.diagnosis = found
            return
    if current is not None:
        current.diagnosis = found
    else:
        report.diagnosis = found


def as_text(report: Report) -> str:
    """For a terminal."""
    lines = []
    for recovery in report.recoveries:
        lines.append(f"generation {recovery.generation}  {recovery.cause or 'not answered'}")
        lines += [f"  hung      {why}" for why in recovery.hangs]
        lines += [f"  slot {slot:<4} {place}" for slot, text in recovery.stacks.items() for place in _innermost(text)]
        lines += [f"  differs   {difference}" for difference in recovery.differing]
        lines += [f"  lost      {loss}" for loss in recovery.lost]
        lines += [f"  spare     {spare}" for spare in recovery.spares]
        if recovery.phases_ms:
            phases = ", ".join(
                f"{name} {recovery.phases_ms[name]:.0f}" for name in PHASES if name in recovery.phases_ms
            )
            lines.append(
                f"  resumed   at step {recovery.resume_step}, {recovery.redone_steps} steps redone; ms: {phases}"
            )
        lines += _verdict(recovery.diagnosis)
    lines += [f"slow  {slow}" for slow in report.slow]
    lines += _verdict(report.diagnosis)
    for other in report.others:
        lines += [f"{other['of']}", *_verdict(other)]
    lines += [f"drill  {drill}" for drill in report.drills]
    lines += [f"turned away {reason}" for reason in report.turned_away]
    lines.append(_ending(report))
    return "\n".join(lines)


def _innermost(stacks: str) -> list[str]:
    """Where the thread was that was asked: faulthandler's last section, from inside out."""
    mine = stacks.rpartition("Current thread")[2] or stacks
    return [line.strip() for line in mine.splitlines() if line.startswith("  File ")][:FRAMES_SHOWN]


def _verdict(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    sure = ("" if found["confident"] else " (not certain)") + (" (a drill)" if found.get("drill") else "")
    lines = [
        f"  verdict   {found['verdict']}{sure}: {found['reason']}",
        f"  culprit   {' '.join(str(value) for value in found['culprit'].values())}",
        f"  advice    {found['action'].replace('_', ' ')}: {found['action_reason']}",
        f"  rules     {', '.join(found['rules']) or 'none'}",
    ]
    return lines + [f"  because   {line['text'][:160]}" for line in found["deciding"]]


def _ending(report: Report) -> str:
    number = len(report.recoveries)
    recovered = f"{number} recover{'y' if number == 1 else 'ies'}"
    step = "no step" if report.committed_step is None else f"step {report.committed_step}"
    end = "it has not said how it ended" if report.exit_code is None else f"exit {report.exit_code}: {report.reason}"
    if report.pauses:
        recovered += f", {report.pauses} pause{'s' if report.pauses > 1 else ''} in which nobody advanced"
    return f"{recovered}, generation {report.generation}, {step} committed; {end}"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a log directory, or in the file itself; a line that a crash has cut off is passed over."""
    found = sorted(path.rglob("events.jsonl")) if path.is_dir() else [path]
    if len(found) != 1 or not found[0].is_file():
        raise UsageError(f"{path}: name the log directory of one job, or its events.jsonl ({len(found)} found)")
    for line in found[0].read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield dict(json.loads(line))
        except ValueError:
            continue


def main(argv: Sequence[str]) -> int:
    """``hotswap report``."""
    parser = argparse.ArgumentParser(prog="hotswap report", description="What a job lost, why, and what it cost.")
    parser.add_argument("path", type=Path, help="log directory of a job, or its events.jsonl")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    report = report_of(read_events(args.path))
    print(json.dumps(report.as_json()) if args.json else as_text(report))
    return EXIT_OK
