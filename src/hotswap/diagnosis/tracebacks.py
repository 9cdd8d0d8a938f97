"""Follows Python tracebacks from line to line: what stands at their end is an exception, whatever its class is called.

A single line cannot tell ``BadChunk: 17`` from a log message. After the frames of a traceback it can be nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotswap.diagnosis.exceptions import family
from hotswap.diagnosis.model import Value
from hotswap.diagnosis.prefixes import Label

STREAMS_MAX = 4096
"""Ranks whose tracebacks are followed at the same time; all are forgotten when there are more."""

_PIPE = re.compile(r"File \"[^\"]*[/\\]multiprocessing[/\\][^\"]*\", line \d+")
"""A frame of the library that passes objects between processes."""
_FRAME = re.compile(r"File \"[^\"]*\", line \d+|Traceback \(most recent call last\)")
_THREAD = re.compile(r"Exception in thread \S")
_LAST = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*))?$")


@dataclass(frozen=True)
class _State:
    """Where a stream is: within frames or not, of a thread beside the program or not, and what the innermost frame was."""

    inside: bool = False
    thread: bool = False
    pipe: bool = False


_OUTSIDE = _State()


class Tracebacks:
    """One for each source; :meth:`follow` is given every line in order.

    Adds to the fields of an exception: ``background``, if it ended a thread beside the program, and ``pipe``, if it came from
    reading what another process should have sent.
    """

    def __init__(self) -> None:
        """Starts outside any traceback."""
        self._states: dict[tuple[object, ...], _State] = {}

    def follow(self, label: Label, kind: str, facts: dict[str, Value]) -> str:
        """The kind of the line: what the decoder found, or an exception. Adds to *facts* what only the context tells."""
        key = (label.rank, label.local_rank, label.node)
        state = self._states.get(key, _OUTSIDE)
        text = label.text
        after = _OUTSIDE
        if _THREAD.match(text):
            after = _State(thread=True)
        elif _FRAME.search(text):
            after = _State(inside=True, thread=state.thread, pipe=_PIPE.search(text) is not None)
        elif label.indented:
            after = state
        elif state.inside:
            kind = _ended(text, kind, facts)
            if kind == "exception":
                facts.update(
                    {name: True for name, holds in (("background", state.thread), ("pipe", state.pipe)) if holds}
                )
        self._remember(key, after)
        return kind

    def _remember(self, key: tuple[object, ...], state: _State) -> None:
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
