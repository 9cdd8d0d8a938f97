"""Finds rules that can never apply and rules that overlap, from the table alone.

A text rule is tried on sentences made from its own expression: if all of them are decided by earlier rules, the rule is
unreachable; if some are, the two overlap and their order is what decides, which is reported only where the verdicts differ
and :data:`INTENDED` does not name the pair.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hotswap.diagnosis import literals as _literals
from hotswap.diagnosis.cases import PREDICATES
from hotswap.diagnosis.cause import RuleBook
from hotswap.diagnosis.model import Evidence, Value
from hotswap.diagnosis.rule import Case, Fact, Rule, Text, Wanted
from hotswap.diagnosis.scan import LITERAL_BYTES_MIN

SENTENCES = 24
"""Sentences made for each rule; every alternative of its expression is used at least once in that many draws."""

INTENDED: frozenset[tuple[str, str]] = frozenset()
"""(earlier, later) pairs that overlap on purpose: the earlier is the special case."""


def report(rules: Sequence[Rule]) -> list[str]:
    """What is wrong with *rules*, one sentence each; empty if nothing is."""
    return [*_names(rules), *_sources(rules), *_unreachable_facts(rules), *_unreachable_texts(rules)]


def _names(rules: Sequence[Rule]) -> Iterable[str]:
    ids = [rule.id for rule in rules]
    for name in sorted({one for one in ids if ids.count(one) > 1}):
        yield f"{name}: more than one rule has this id"
    known = set(ids)
    for rule in rules:
        for cause in rule.echo_of:
            if cause not in known:
                yield f"{rule.id}: is an echo of {cause}, which is no rule"
        if isinstance(rule.when, Case) and rule.when.predicate not in PREDICATES:
            yield f"{rule.id}: there is no predicate {rule.when.predicate}"


SOURCE = re.compile(r"https://(?P<host>[a-z0-9-]+(?:\.[a-z0-9-]+)+)(?P<path>/[^\s?#]+)(?:\?[^\s#]*)?(?:#\S+)?")
"""An address that anybody can open, of a page and not just of a site."""
PRIVATE = re.compile(r"(?:^|\.)(?:local|localhost|internal|corp|lan|test|example|invalid)(?:\.|$)|^\d+(?:\.\d+){3}$")
_THREAD = re.compile(r"/[\w.-]+/[\w.-]+/(?:(?:issues|pull|discussions)/\d+|(?:blob|tree|wiki|releases)/.+)")


def _sources(rules: Sequence[Rule]) -> Iterable[str]:
    for rule in rules:
        if complaint := source_complaint(rule.source):
            yield f"{rule.id}: {complaint}: {rule.source}"


def source_complaint(source: str) -> str:
    """What is wrong with the form of an address; empty if nothing is. Whether the page says so, only a reader can tell."""
    match = SOURCE.fullmatch(source)
    if match is None:
        return "its source is not the https address of a page"
    if PRIVATE.search(match["host"]):
        return "its source is not public"
    if match["host"] == "github.com" and not _THREAD.fullmatch(match["path"]):
        return "its source is no thread and no file of a repository"
    return ""


def _unreachable_facts(rules: Sequence[Rule]) -> Iterable[str]:
    earlier: list[tuple[Rule, Fact]] = []
    for rule in rules:
        if not isinstance(rule.when, Fact):
            continue
        for other, fact in earlier:
            if fact.kind == rule.when.kind and _covers(fact, rule.when):
                yield f"{rule.id}: never applies, {other.id} takes everything before it"
                break
        earlier.append((rule, rule.when))


def _covers(general: Fact, special: Fact) -> bool:
    """Whether every fact that *special* wants is wanted by *general* too."""
    return all(name in special.where and _within(special.where[name], want) for name, want in general.where.items())


def _within(special: Wanted, general: Wanted) -> bool:
    if isinstance(special, range):
        return isinstance(general, range) and special.start >= general.start and special.stop <= general.stop
    values: tuple[Value, ...] = special if isinstance(special, tuple) else (special,)
    if isinstance(general, (tuple, range)):
        return all(value in general for value in values)
    return all(value == general for value in values)


def _unreachable_texts(rules: Sequence[Rule]) -> Iterable[str]:
    book = RuleBook(rules)
    for rule in rules:
        if not isinstance(rule.when, Text):
            continue
        found = _literals.required_literals(rule.when.pattern)
        short = sorted(one for one in found if len(_literals.without_noise(one)) < LITERAL_BYTES_MIN)
        if not found or short:
            yield f"{rule.id}: no literal is certain to be found by, so it would be tried on every line {short or ''}".rstrip()
        made = sentences(rule.when.pattern)
        winners = [book.first(Evidence(text=text)) for text in made if rule.when.matches(Evidence(text=text))]
        if not winners:
            yield f"{rule.id}: no sentence could be made that it applies to"
        elif all(winner is not rule for winner in winners):
            others = ", ".join(sorted({winner.id for winner in winners if winner}))
            yield f"{rule.id}: never applies, {others} takes everything before it"
        else:
            taken = {winner for winner in winners if winner and winner is not rule}
            for other in sorted(taken, key=lambda one: one.id):
                if other.verdict is not rule.verdict and (other.id, rule.id) not in INTENDED:
                    yield f"{rule.id}: overlaps {other.id}, which says {other.verdict.value}; their order decides"


def sentences(pattern: str) -> list[str]:
    """Texts made from an expression by choosing among its alternatives; the same ones every time."""
    draw = random.Random(pattern)
    tree = list(_literals.parsed(pattern))
    return [_say(tree, draw) for _ in range(SENTENCES)]


def _say(nodes: Sequence[Any], draw: random.Random) -> str:
    return "".join(_say_node(code, value, draw) for code, value in nodes)


def _say_node(code: Any, value: Any, draw: random.Random) -> str:
    name = str(code)
    if name == "LITERAL":
        return chr(value)
    if name == "NOT_LITERAL":
        return "x" if value != ord("x") else "y"
    if name == "ANY":
        return " "
    if name == "IN":
        return _say_set(value)
    if name == "SUBPATTERN":
        return _say(list(value[3]), draw)
    if name == "BRANCH":
        return _say(list(draw.choice(value[1])), draw)
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        return "".join(_say(list(value[2]), draw) for _ in range(max(value[0], 1 if value[1] else 0)))
    return ""


_CANDIDATES = "nx1 q.'-`:"


def _say_set(items: Sequence[Any]) -> str:
    """The first usual character that the set allows, or one that it names."""
    negated = str(items[0][0]) == "NEGATE"
    expression = _literals.set_expression(items)
    for candidate in _CANDIDATES:
        if re.fullmatch(expression, candidate):
            return candidate
    named = [chr(value) for code, value in items if str(code) == "LITERAL"]
    return "z" if negated or not named else named[0]
