"""Draws the tables and diagrams of docs/protocol.md from the code that they describe.

``python -m hotswap.sim.protocol_docs [--check] [FILE]`` writes, between the markers of the file, what the transition table and
the message classes say now; with ``--check`` it only says whether the file is up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from hotswap.core import messages
from hotswap.core.commands import Command
from hotswap.core.recovery import PHASE_NAMES
from hotswap.core.transitions import TRANSITIONS, Kind, Phase
from hotswap.sim.generated import keep

DEFAULT = Path("docs/protocol.md")


def state_diagram() -> str:
    """The phases and what leads from one to another, as a mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_name(Phase.FORMING)}"]
    for phase in Phase:
        if phase is not Phase.STOPPED:
            lines.append(f'    state "{phase.value}" as {_name(phase)}')
    for before in Phase:
        for after in Phase:
            kinds = [kind for kind in Kind if after in TRANSITIONS.get((before, kind), ()) and after is not before]
            # Everything may end in a stop: drawn in full, that hides the rest. The table below has it.
            if kinds and after is not Phase.STOPPED:
                lines.append(f"    {_name(before)} --> {_name(after)}: {', '.join(kind.value for kind in kinds)}")
    return "\n".join([*lines, "```"])


def transition_table() -> str:
    """One row for each kind of event: where it may happen and where it may lead."""
    rows = ["| event | while | may lead to |", "| --- | --- | --- |"]
    for kind in Kind:
        groups: dict[tuple[Phase, ...], list[Phase]] = {}
        for phase in Phase:
            if (phase, kind) in TRANSITIONS:
                leads = tuple(to for to in Phase if to in TRANSITIONS[phase, kind] and to is not phase)
                groups.setdefault(leads, []).append(phase)
        for leads, phases in groups.items():
            rows.append(f"| {kind.value} | {_list(phases)} | {_list(leads) or 'stays'} |")
    return "\n".join(rows)


def phase_table() -> str:
    """Names of the phases as they appear in events, beside those of the state machine."""
    rows = ["| in events and reports | in the state machine |", "| --- | --- |"]
    rows += [f"| {name} | {phase.value} |" for phase, name in PHASE_NAMES.items()]
    return "\n".join(rows)


def messages_from_agents() -> str:
    """All messages of an agent to the coordinator."""
    return _messages((*get_args(messages.FromAgent), *get_args(messages.AsideMessage)))


def messages_to_agents() -> str:
    """All messages of the coordinator to an agent."""
    return _messages(get_args(messages.ToAgent))


def commands() -> str:
    """What operators' commands say, and how they are answered."""
    return _messages(get_args(Command))


def _messages(classes: tuple[type, ...]) -> str:
    rows = ["| message | fields | meaning |", "| --- | --- | --- |"]
    for cls in classes:
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(cls))
        rows.append(f"| `{cls.__name__}` | {names} | {_one_line(cls)} |")
    return "\n".join(rows)


def _one_line(cls: type) -> str:
    text = re.sub(r"\s+", " ", inspect.getdoc(cls) or "").replace("``", "`")
    return text.replace("|", "\\|")


def _list(phases: list[Phase] | tuple[Phase, ...]) -> str:
    return ", ".join(phase.value for phase in phases)


def _name(phase: Phase) -> str:
    return phase.name.lower()


SECTIONS: dict[str, Callable[[], str]] = {
    "state diagram": state_diagram,
    "transitions": transition_table,
    "phases": phase_table,
    "from agents": messages_from_agents,
    "to agents": messages_to_agents,
    "commands": commands,
}


def render(text: str) -> str:
    """*text* with the sections between its markers drawn anew. ValueError if a marker is missing."""
    for name, draw in SECTIONS.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the file needs the lines {begin!r} and {end!r} once each")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{draw()}\n\n{end}{after}"
    return text


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if the file is up to date, or now is."""
    return keep("hotswap.sim.protocol_docs", __doc__, DEFAULT, render, argv)


if __name__ == "__main__":
    sys.exit(main())
