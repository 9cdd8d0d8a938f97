"""Follows the headings of reports about nodes and pods: the lines below them are about the node that the heading names.

``scontrol show node`` writes the name first and the reason lines later; so does ``kubectl describe``.
"""

from __future__ import annotations

import re

_NODE = re.compile(r"^NodeName=([\w.-]+)\b|^Node:\s+([\w.-]+)(?:/[\d.]*)?$|^=+\s*(?:node|host)[ :]+([\w.-]+)\s*=*$")
_OTHER = re.compile(r"^(?:JobId|PartitionName|StepId)=|^Name:\s")
"""Where a report about something else begins."""


class Headings:
    """One for each source; :meth:`node` is given every line in order."""

    def __init__(self) -> None:
        """No heading was seen yet."""
        self._node: str | None = None

    def node(self, text: str, own: str | None) -> str | None:
        """The node that the line is about: what it says itself, else what the heading above it says."""
        if match := _NODE.match(text):
            self._node = match[1] or match[2] or match[3]
        elif _OTHER.match(text):
            self._node = None
        return own or self._node
