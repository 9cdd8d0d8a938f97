"""Which of a thousand literals are in a line, without asking for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, AnyStr, Generic

GRAM = 3
"""Characters by which literals are found; no literal may be shorter."""
LONG = 4096
"""In longer lines each literal is looked for by itself, which then is quicker."""


class Finder(Generic[AnyStr]):
    """Keeps each literal under that of its character triples which the fewest others have."""

    def __init__(self, literals: Iterable[AnyStr]) -> None:
        """Indexes *literals*, of at least :data:`GRAM` characters each."""
        self._literals: tuple[AnyStr, ...] = tuple(sorted(set(literals)))
        often = Counter(gram for literal in self._literals for gram in set(_grams(literal)))
        self._by_gram: dict[tuple[Any, ...], list[AnyStr]] = {}
        for literal in self._literals:
            rarest = min(_grams(literal), key=lambda gram: (often[gram], gram))
            self._by_gram.setdefault(rarest, []).append(literal)
        self._known = frozenset(self._by_gram)

    def within(self, line: AnyStr) -> list[AnyStr]:
        """Those that are in *line*, in no particular order."""
        if len(line) > LONG:
            return [literal for literal in self._literals if literal in line]
        near = self._known.intersection(_grams(line))
        return [literal for gram in near for literal in self._by_gram[gram] if literal in line]


def _grams(text: AnyStr) -> Iterator[tuple[Any, ...]]:
    """As tuples, of which zip makes no new one while nobody keeps it: twice as fast as slices."""
    return zip(text, text[1:], text[2:], strict=False)
