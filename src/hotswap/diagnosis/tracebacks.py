"""Follows Python tracebacks from line to line: what stands at their end is an exception, whatever its class is called.

A single line cannot tell ``BadChunk: 17`` from a log message. After the frames of a traceback it can be nothing else.
"""

from __future__ import annotations

import re

from hotswap.diagnosis.exceptions import family
from hotswap.diagnosis.model import Value
from hotswap.diagnosis.prefixes import Label

STREAMS_MAX = 4096
"""Ranks whose tracebacks are followed at the same time; all are forgotten when there are more."""

_FRAME = re.compile(r"File \"[^\"]*\", line \d+|Traceback \(most recent call last\)")
_THREAD = re.compile(r"Exception in thread \S")
_LAST = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*))?$")

_OUTSIDE, _THREAD_SAID, _FRAMES, _THREAD_FRAMES = range(4)


class Tracebacks:
    """One for each source; :meth:`follow` is given every line in order."""

    def __init__(self) -> None:
        """Starts outside any traceback."""
        self._states: dict[tuple[object, ...], int] = {}

    def follow(self, label: Label, kind: str, facts: dict[str, Value]) -> str:
        """The kind of the line: what the decoder found, or an exception. Adds to *facts* what only the context tells."""
        key = (label.rank, label.local_rank, label.node)
        state = self._states.get(key, _OUTSIDE)
        text = label.text
        after = _OUTSIDE
        if _THREAD.match(text):
            after = _THREAD_SAID
        elif _FRAME.search(text):
            after = _THREAD_FRAMES if state in (_THREAD_SAID, _THREAD_FRAMES) else _FRAMES
        elif label.indented:
            after = state
        elif state in (_FRAMES, _THREAD_FRAMES):
            kind = _ended(text, kind, facts)
            if state == _THREAD_FRAMES and kind == "exception":
                facts["background"] = True
        self._remember(key, after)
        return kind

    def _remember(self, key: tuple[object, ...], state: int) -> None:
        if state == _OUTSIDE:
            self._states.pop(key, None)
            return
        if len(self._states) >= STREAMS_MAX:
            self._states.clear()
        self._states[key] = state


def _ended(text: str, kind: str, facts: dict[str, Value]) -> str:
    match = _LAST.match(text)
    if kind not in ("line", "complaint") or not match:
        return kind
    name = match[1].rsplit(".", 1)[-1]
    message = (match[2] or "").strip()
    facts.clear()
    facts.update({"type": name, "family": family(name, message), "message": message[:300]})
    return "exception"
