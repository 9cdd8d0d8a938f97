"""What a new coordinator knows from the one before it: read in its event log, or in the store that several share.

It is not needed: a coordinator without it learns what matters from the agents. With it, it knows two things that the
agents may not: which numbers of generations are used up though nobody who is left has heard of them, and whether the job
has ever trained, even if no node is left that has. A record may be missing, or end too early; whoever has accepted a later
generation than it tells of shows that. Which numbers are used up only a clock can say then, which no coordinator before can have
been ahead of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hotswap.core import counsel
from hotswap.core.events import Advice
from hotswap.core.history import History
from hotswap.core.types import Generation, Step


@dataclass(frozen=True, kw_only=True)
class Past:
    """``generation``: the newest that was announced. ``plans``: generation and resume step of the plans that still matter.

    ``started``: training was told to go at least once. ``exit_code``: the job was ended with it, for ``reason``. ``excluded``:
    hosts that are to get no place any more, and why; ``avoided``: those that are to come last. ``floor``: no earlier coordinator has
    used this number or a higher one; 0 where the record is complete for certain.
    """

    generation: Generation = 0
    started: bool = False
    plans: tuple[tuple[Generation, Step], ...] = ()
    exit_code: int | None = None
    reason: str = ""
    excluded: tuple[tuple[str, str], ...] = ()
    avoided: tuple[tuple[str, str], ...] = ()
    floor: Generation = 0

    def after(self, event: str, fields: Mapping[str, object]) -> Past:
        """What is known once *event* has been recorded with its *fields*."""
        number, step, code = fields.get("generation"), fields.get("resume_step"), fields.get("exit_code")
        past = self
        if isinstance(number, int) and number > past.generation:
            past = replace(past, generation=number)
        if event == "recovery_planned" and isinstance(number, int) and isinstance(step, int):
            past = replace(past, plans=History([*past.plans, (number, step)]).plans)
        if event == "training_started" and not past.started:
            past = replace(past, started=True)
        if event == "job_stopped" and isinstance(code, int):
            past = replace(past, exit_code=code, reason=str(fields.get("reason", "")))
        if event == "advised" and fields.get("advice") == Advice.EXCLUDE.value:
            past = replace(past, excluded=_noted(past.excluded, fields))
        if event == "advised" and fields.get("advice") == Advice.AVOID.value:
            past = replace(past, avoided=_noted(past.avoided, fields))
        return past


def _noted(hosts: tuple[tuple[str, str], ...], fields: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    known = dict(hosts)
    counsel.note(known, str(fields.get("host")), str(fields.get("reason")))
    return tuple(known.items())


def recall(records: Iterable[Mapping[str, object]]) -> Past:
    """Read an event log: dictionaries with ``event``, ``generation`` and the event's own fields, oldest first.

    The log is written before what it tells of is done, so it may know more than anybody was told, never less.
    """
    past = Past()
    for record in records:
        past = past.after(str(record.get("event")), record)
    return past
