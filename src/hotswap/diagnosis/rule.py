"""A rule is data: when it applies, what it means, who is to blame, why we think so and where that is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Union

from hotswap.diagnosis.model import Blames, Evidence, Strength, Value, Verdict

Wanted = Union[Value, tuple[Value, ...], range]


@dataclass(frozen=True)
class Text:
    """Applies to an observation whose text contains a match of ``pattern`` (a regular expression, case counts)."""

    pattern: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, compiled once."""
        return re.compile(self.pattern)

    def matches(self, evidence: Evidence) -> bool:
        """Whether the text has a match."""
        return bool(evidence.text) and self.compiled.search(evidence.text) is not None


@dataclass(frozen=True)
class Fact:
    """Applies to an observation of ``kind`` whose fields have the wanted values: one, one of several, or one of a range."""

    kind: str
    where: Mapping[str, Wanted]

    def matches(self, evidence: Evidence) -> bool:
        """Whether kind and all fields are as wanted."""
        return evidence.kind == self.kind and all(_is(evidence.fact(name), want) for name, want in self.where.items())


@dataclass(frozen=True)
class Case:
    """Applies to the whole of the observations: ``predicate`` names a function of :mod:`hotswap.diagnosis.cases`."""

    predicate: str


When = Union[Text, Fact, Case]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table. ``echo_of`` names rules that explain this one away when they were seen on the same node."""

    id: str
    when: When
    verdict: Verdict
    strength: Strength
    confidence: float
    blames: Blames
    reason: str
    source: str
    echo_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Relations that every row must keep."""
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"rule {self.id}: confidence is {self.confidence}, not between 0 and 1")
        if not self.reason or not self.source:
            raise ValueError(f"rule {self.id}: a rule needs a reason and a source")


def _is(have: Value | None, want: Wanted) -> bool:
    if isinstance(want, range):
        return isinstance(have, (int, float)) and want.start <= have < want.stop
    return have in want if isinstance(want, tuple) else have == want


def text_rule(
    rule_id: str,
    pattern: str,
    verdict: Verdict,
    strength: Strength,
    confidence: float,
    blames: Blames,
    reason: str,
    source: str,
    echo_of: tuple[str, ...] = (),
) -> Rule:
    """A row that looks for *pattern*; positional, so that a table of them can be read."""
    return Rule(
        id=rule_id,
        when=Text(pattern),
        verdict=verdict,
        strength=strength,
        confidence=confidence,
        blames=blames,
        reason=reason,
        source=source,
        echo_of=echo_of,
    )
