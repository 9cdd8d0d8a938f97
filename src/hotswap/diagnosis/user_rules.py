"""Rules of a site or a user, from a JSON file. They are tried before hotswap's own, in the order of the file.

A list of objects with the fields of a rule: ``id``, ``pattern`` (an expression) or ``kind`` with ``where`` (fields of a decoded
fact), ``verdict``, and optionally ``strength``, ``confidence``, ``blames``, ``reason``, ``source``, ``echo_of``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotswap.diagnosis.literals import required_literals, without_noise
from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Fact, Rule, Text
from hotswap.diagnosis.scan import LITERAL_BYTES_MIN
from hotswap.errors import UsageError

FILE_BYTES_MAX = 1 << 20
_FIELDS = frozenset(
    {"id", "pattern", "kind", "where", "verdict", "strength", "confidence", "blames", "reason", "source", "echo_of"}
)


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules in *path*; :class:`UsageError` says which one is wrong and how."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{str(path)!r} has more than {FILE_BYTES_MAX} bytes")
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read rules from {str(path)!r}: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"{str(path)!r} must hold a list of rules")
    rules = tuple(_rule(row, str(path)) for row in rows)
    ids = [rule.id for rule in rules]
    if len(set(ids)) < len(ids):
        raise UsageError(f"{str(path)!r} has two rules with one id")
    return rules


def _rule(row: Any, source: str) -> Rule:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise UsageError(f"a rule in {source!r} is no object with an id")
    name = row["id"]
    if unknown := set(row) - _FIELDS:
        raise UsageError(f"rule {name!r} has unknown fields: {', '.join(sorted(unknown))}")
    try:
        return Rule(
            id=name,
            when=_when(row),
            verdict=Verdict(row["verdict"]),
            strength=Strength[str(row.get("strength", "CAUSE")).upper()],
            confidence=float(row.get("confidence", 0.9)),
            blames=Blames(row.get("blames", "nobody")),
            reason=str(row.get("reason") or "a rule of this site"),
            source=str(row.get("source") or source),
            echo_of=tuple(str(one) for one in row.get("echo_of", ())),
        )
    except (KeyError, ValueError, TypeError, re.error) as error:
        raise UsageError(f"rule {name!r}: {error}") from None


def _when(row: Mapping[str, Any]) -> Text | Fact:
    if ("pattern" in row) == ("kind" in row):
        raise ValueError("give either a pattern or a kind")
    if "kind" in row:
        where = row.get("where", {})
        if not isinstance(where, dict):
            raise ValueError("where must be an object")
        return Fact(
            str(row["kind"]), {key: tuple(want) if isinstance(want, list) else want for key, want in where.items()}
        )
    pattern = str(row["pattern"])
    re.compile(pattern)
    literals = required_literals(pattern)
    if not literals or min(len(without_noise(one)) for one in literals) < LITERAL_BYTES_MIN:
        raise ValueError(
            "the pattern needs three letters in a row (beside a to f and digits) that every match contains"
        )
    return Text(pattern)
