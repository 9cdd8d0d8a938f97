"""What a new coordinator can read in the event log of the one before it.

The log is not needed: a coordinator without it learns what matters from the agents. With it, it knows two things that the
agents may not: which numbers of generations are used up though nobody who is left has heard of them, and whether the job
has ever trained, even if no node is left that has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hotswap.core.events import Advice
from hotswap.core.types import Generation, Step


@dataclass(frozen=True, kw_only=True)
class Past:
    """``generation``: the newest that was announced. ``plans``: generation and resume step of every plan that was made.

    ``started``: training was told to go at least once. ``excluded``: hosts that are to get no place any more, and why.
    """

    generation: Generation = 0
    started: bool = False
    plans: tuple[tuple[Generation, Step], ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()


def recall(records: Iterable[Mapping[str, object]]) -> Past:
    """Read an event log: dictionaries with ``event``, ``generation`` and the event's own fields, oldest first.

    The log is written before what it tells of is done, so it may know more than anybody was told, never less.
    """
    generation, started = 0, False
    plans: list[tuple[Generation, Step]] = []
    excluded: dict[str, str] = {}
    for record in records:
        number, step = record.get("generation"), record.get("resume_step")
        if isinstance(number, int):
            generation = max(generation, number)
            if record.get("event") == "recovery_planned" and isinstance(step, int):
                plans.append((number, step))
        started = started or record.get("event") == "training_started"
        if record.get("event") == "advised" and record.get("advice") == Advice.EXCLUDE.value:
            excluded[str(record.get("host"))] = str(record.get("reason"))
    return Past(generation=generation, started=started, plans=tuple(plans), excluded=tuple(excluded.items()))
