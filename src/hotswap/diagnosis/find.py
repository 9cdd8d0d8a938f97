"""Which of a thousand literals are in a line, without asking for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import AnyStr, Generic

GRAM = 3
"""Characters by which literals are found; no literal may be shorter."""
LONG = 4096
"""In longer lines each literal is looked for by itself, which then is quicker."""


class Finder(Generic[AnyStr]):
    """Keeps each literal under that of its character triples which the fewest others have."""

    def __init__(self, literals: Iterable[AnyStr]) -> None:
        """Indexes *literals*, of at least :data:`GRAM` characters each."""
        self._literals: tuple[AnyStr, ...] = tuple(sorted(set(literals)))
        often = Counter(gram for literal in self._literals for gram in _grams(literal))
        self._by_gram: dict[AnyStr, list[AnyStr]] = {}
        for literal in self._literals:
            rarest = min(_grams(literal), key=lambda gram: (often[gram], gram))
            self._by_gram.setdefault(rarest, []).append(literal)

    def within(self, line: AnyStr) -> list[AnyStr]:
        """Those that are in *line*, in no particular order."""
        if len(line) > LONG:
            return [literal for literal in self._literals if literal in line]
        near = _grams(line) & self._by_gram.keys()
        return [literal for gram in near for literal in self._by_gram[gram] if literal in line]


def _grams(text: AnyStr) -> set[AnyStr]:
    return {text[at : at + GRAM] for at in range(len(text) - GRAM + 1)}
