"""Which literal strings a regular expression cannot match without: what lets gigabytes pass without a second look.

Derived from the expression itself, so no rule has to declare (and can forget) what it depends on.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# The parser of the standard library has had two names, and is declared in neither.
_OLD = sys.version_info < (3, 11)
_codes: Any = importlib.import_module("sre_constants" if _OLD else "re._constants")
_parser: Any = importlib.import_module("sre_parse" if _OLD else "re._parser")

NOISE = b"0123456789abcdef"
"""Characters that numbers are made of, decimal and hexadecimal."""


def without_noise(literal: str) -> bytes:
    """What of a literal remains when all that may be a number is taken out of a line."""
    return literal.encode().translate(None, NOISE)


Node = tuple[Any, Any]


def parsed(pattern: str) -> Any:
    """The expression as a tree of (code, value)."""
    return _parser.parse(pattern)


_CATEGORIES = {"CATEGORY_DIGIT": r"\d", "CATEGORY_WORD": r"\w", "CATEGORY_SPACE": r"\s"}
_CATEGORIES |= {name.replace("CATEGORY_", "CATEGORY_NOT_"): text.upper() for name, text in _CATEGORIES.items()}


def set_expression(items: Sequence[Node]) -> str:
    """A set of characters, written as an expression again."""
    parts = []
    for code, value in items:
        if code is _codes.LITERAL:
            parts.append(f"\\x{value:02x}" if value < 256 else re.escape(chr(value)))
        elif code is _codes.RANGE:
            parts.append(f"\\x{value[0]:02x}-\\x{value[1]:02x}")
        elif code is _codes.CATEGORY:
            parts.append(_CATEGORIES[str(value)])
    negated = "^" if items and items[0][0] is _codes.NEGATE else ""
    return f"[{negated}{''.join(parts)}]"


@lru_cache(maxsize=4096)
def required_literals(pattern: str) -> frozenset[str]:
    """Strings of which every match of *pattern* contains at least one; empty if nothing is certain.

    >>> sorted(required_literals(r"(?:Stale|stale) file \\d+"))
    ['Stale', 'stale']
    """
    return _of_sequence(list(_parser.parse(pattern)))


SPELLINGS_MAX = 64
"""Ways in which one run of an expression may be spelled before it is cut in two."""


def _of_sequence(nodes: Sequence[Node]) -> frozenset[str]:
    """The best of what the parts of a sequence guarantee: the set whose shortest member is longest."""
    options: list[frozenset[str]] = []
    run = frozenset({""})
    for code, value in nodes:
        spelled = _spellings(code, value)
        if spelled and len(spelled) * len(run) <= SPELLINGS_MAX:
            run = frozenset(before + after for before in run for after in spelled)
            continue
        options += [run, spelled if spelled else _of_node(code, value)]
        run = frozenset({""})
    options.append(run)
    return max((option for option in options if option and "" not in option), key=_quality, default=frozenset())


def _spellings(code: Any, value: Any) -> frozenset[str]:
    """All texts that a part can stand for, if they are few; empty if they are many."""
    if code is _codes.LITERAL:
        return frozenset({chr(value)})
    if code is _codes.AT:
        return frozenset({""})
    if code is _codes.IN and all(item[0] is _codes.LITERAL for item in value):
        return frozenset(chr(item[1]) for item in value)
    if code is _codes.SUBPATTERN and not value[1]:
        return _spellings_of_all(list(value[3]))
    if code is _codes.BRANCH:
        branches = [_spellings_of_all(list(branch)) for branch in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT) and value[:2] == (0, 1):
        inner = _spellings_of_all(list(value[2]))
        return inner | {""} if inner else frozenset()
    return frozenset()


def _spellings_of_all(nodes: Sequence[Node]) -> frozenset[str]:
    run = frozenset({""})
    for code, value in nodes:
        spelled = _spellings(code, value)
        if not spelled or len(spelled) * len(run) > SPELLINGS_MAX:
            return frozenset()
        run = frozenset(before + after for before in run for after in spelled)
    return run


def _of_node(code: Any, value: Any) -> frozenset[str]:
    if code is _codes.SUBPATTERN:
        group_flags = value[1]
        return frozenset() if group_flags else _of_sequence(list(value[3]))
    if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT) and value[0] >= 1:
        return _of_sequence(list(value[2]))
    if code is _codes.BRANCH:
        branches = [_of_sequence(list(branch)) for branch in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    return frozenset()


def _quality(option: frozenset[str]) -> tuple[int, int]:
    return min(len(without_noise(literal)) for literal in option), -len(option)


def minimal(literals: frozenset[str]) -> frozenset[str]:
    """Without those that contain another of them: finding the shorter one finds them too."""
    kept: list[str] = []
    for literal in sorted(literals, key=lambda text: (len(text), text)):
        if not any(shorter in literal for shorter in kept):
            kept.append(literal)
    return frozenset(kept)
