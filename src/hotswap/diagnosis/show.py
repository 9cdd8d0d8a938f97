"""A diagnosis as people read it in a terminal, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from hotswap.diagnosis.model import Culprit, Diagnosis, Evidence, Verdict
from hotswap.diagnosis.policy import Decision

_COLOURS = {
    Verdict.NODE_FAULT: "31",
    Verdict.PROCESS_FAULT: "33",
    Verdict.USER_ERROR: "35",
    Verdict.UNKNOWN: "36",
}
_OTHER = "34"
TEXT_MAX = 500


def as_json(diagnosis: Diagnosis, decision: Decision) -> dict[str, Any]:
    """Plain data; the field names are part of the interface."""
    return {
        "verdict": diagnosis.verdict.value,
        "confidence": diagnosis.confidence,
        "confident": diagnosis.confident,
        "culprit": _culprit(diagnosis.culprit),
        "action": decision.action.value,
        "action_reason": decision.reason,
        "reason": diagnosis.reason,
        "rules": list(diagnosis.rules),
        "deciding": [_evidence(one) for one in diagnosis.deciding],
        "echoes": [_evidence(one) for one in diagnosis.echoes],
        "echo_rules": list(diagnosis.echo_rules),
        "suspects": [_culprit(one) for one in diagnosis.suspects],
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    named = {"node": culprit.node, "rank": culprit.rank, "gpu": culprit.gpu, "peer": culprit.peer}
    present = {name: value for name, value in named.items() if value is not None}
    return {"kind": culprit.kind.value, **present, **({"detail": culprit.detail} if culprit.detail else {})}


def _evidence(one: Evidence) -> dict[str, Any]:
    where = {"source": one.source, "node": one.node, "rank": one.rank, "gpu": one.gpu, "time": one.time}
    present = {name: value for name, value in where.items() if value is not None}
    return {"text": one.text[:TEXT_MAX], "count": one.count, "kind": one.kind, **present}


def as_text(diagnosis: Diagnosis, decision: Decision, *, colour: bool, width: int = 120) -> str:
    """A few lines: the answer first, then what it rests on."""

    def paint(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if colour else text

    head = paint(f"{diagnosis.verdict.value}", f"1;{_COLOURS.get(diagnosis.verdict, _OTHER)}")
    sure = "" if diagnosis.confident else ", not certain"
    lines = [
        f"{head}  (confidence {diagnosis.confidence:.2f}{sure})",
        f"  why      {diagnosis.reason}",
        f"  culprit  {diagnosis.culprit}",
        f"  action   {decision.action.value.replace('_', ' ')}: {decision.reason}",
        f"  rules    {', '.join(diagnosis.rules) or 'none'}",
    ]
    if diagnosis.suspects:
        lines.append(f"  suspects {'; '.join(str(one) for one in diagnosis.suspects)}")
    if diagnosis.deciding:
        lines += [paint("decided by", "1"), *_quoted(diagnosis.deciding, width)]
    if diagnosis.echoes:
        lines += [paint("only echoes", "2"), *(paint(line, "2") for line in _quoted(diagnosis.echoes, width))]
    return "\n".join(lines)


def _quoted(evidence: Iterable[Evidence], width: int) -> list[str]:
    lines = []
    for one in evidence:
        place = " ".join(part for part in (_clock(one.time), one.node, _rank(one.rank)) if part)
        times = f" (x{one.count})" if one.count > 1 else ""
        text = "".join(character if character.isprintable() else " " for character in one.text)
        line = f"  {place + '  ' if place else ''}{text}"
        lines.append((line if len(line) + len(times) <= width else line[: width - len(times) - 1] + "…") + times)
    return lines


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%H:%M:%S", time.gmtime(seconds))


def _rank(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}"
