"""What a job leaves behind as evidence: one line per attempt and slot, and the digests of the final state.

Every line is appended with a single write before the update it speaks of, so a kill loses a whole line or none. The history
that counts is what is left when the lines of attempts that were redone are taken away.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Record:
    """One attempt at one step on one slot. Losses as ``float.hex`` (exact), None where the slot does not see one."""

    generation: int
    step: int
    slot: int
    dp_rank: int
    loss: str | None
    sample_ids: tuple[int, ...]
    held_out_loss: str | None = None


class RecordingSession(Protocol):
    """What the recorder needs of a session."""

    slot: int
    generation: int
    rehearsing: bool

    @property
    def step(self) -> int:
        """Updates done."""

    def snapshot_nbytes(self) -> int:
        """Bytes of a snapshot."""

    def digests(self) -> dict[str, str]:
        """SHA-256 by part of the state."""


class Recorder:
    """Writes the evidence of one slot."""

    def __init__(self, directory: str | Path | None, session: RecordingSession, *, dp_rank: int) -> None:
        """Without *directory* nothing is written."""
        self._directory = Path(directory) if directory else None
        self._session = session
        self._dp_rank = dp_rank

    def attempt(self, sample_ids: Iterable[int], *, loss: float | None, held_out_loss: float | None = None) -> None:
        """Note an attempt that is about to update the model. A rehearsal's numbers mean nothing and are not noted."""
        session = self._session
        if self._directory is None or session.rehearsing:
            return
        record = Record(
            generation=session.generation,
            step=session.step,
            slot=session.slot,
            dp_rank=self._dp_rank,
            loss=None if loss is None else float(loss).hex(),
            sample_ids=tuple(sample_ids),
            held_out_loss=None if held_out_loss is None else float(held_out_loss).hex(),
        )
        append_line(self._directory / "records" / f"slot{session.slot}.jsonl", asdict(record))

    def final(self) -> None:
        """Note the digests of the state at the end."""
        if self._directory is None:
            return
        content = {
            "slot": self._session.slot,
            "step": self._session.step,
            "digests": self._session.digests(),
            "snapshot_nbytes": self._session.snapshot_nbytes(),
        }
        path = self._directory / "final" / f"slot{self._session.slot}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append one JSON line with one write(2)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(content).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


# --- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class History:
    """What survived. ``losses[step][dp_rank]`` are exact hex strings; ``faults`` say what is wrong, empty if nothing is."""

    losses: dict[int, dict[int, str]] = field(default_factory=dict)
    held_out: dict[int, dict[int, str]] = field(default_factory=dict)
    sample_ids: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def mean_losses(self) -> list[float]:
        """Loss of each step in order, averaged over data-parallel ranks."""
        return [_mean(by_rank) for _, by_rank in sorted(self.losses.items())]

    def mean_held_out(self) -> dict[int, float]:
        """Evaluation loss at the steps that have one."""
        return {step: _mean(by_rank) for step, by_rank in sorted(self.held_out.items())}


def _mean(by_rank: Mapping[int, str]) -> float:
    values = [float.fromhex(value) for _, value in sorted(by_rank.items())]
    return sum(values) / len(values)


def read_records(directory: Path) -> list[Record]:
    """All lines of all slots."""
    records = []
    for path in sorted((directory / "records").glob("slot*.jsonl")):
        for line in path.read_text().splitlines():
            records.append(record_of(json.loads(line)))
    return records


def record_of(content: Mapping[str, Any]) -> Record:
    """A record from its line."""
    return Record(**{**content, "sample_ids": tuple(content["sample_ids"])})


def resume_points(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Generation to the step it went on from, of the event log. Generations that never got a plan are not in it."""
    return {int(e["generation"]): int(e["resume_step"]) for e in events if e["event"] == "recovery_planned"}


def surviving(records: Iterable[Record], resumed: Mapping[int, int]) -> list[Record]:
    """Records of attempts that were not taken back: a later generation began at or before their step."""
    return [r for r in records if not any(g > r.generation and at <= r.step for g, at in resumed.items())]


def merge(
    records: Iterable[Record],
    resumed: Mapping[int, int],
    planned: Mapping[int, Mapping[int, tuple[int, ...]]],
    *,
    slots: int | None = None,
) -> History:
    """The history that counts, checked: every slot consumed its samples once in every step, and no others.

    *planned*: step to data-parallel rank to sample ids, for all steps. *slots*: how many
    slots the job has, by default as many as left a line.
    """
    kept = surviving(records, resumed)
    faults = [*_unplanned(kept, planned), *_missing_or_double(kept, planned, slots), *_disagreeing(kept)]
    history = History(faults=tuple(faults))
    for record in kept:
        history.sample_ids.setdefault(record.step, {})[record.dp_rank] = record.sample_ids
        if record.loss is not None:
            history.losses.setdefault(record.step, {})[record.dp_rank] = record.loss
        if record.held_out_loss is not None:
            history.held_out.setdefault(record.step, {})[record.dp_rank] = record.held_out_loss
    return history


def _unplanned(kept: Iterable[Record], planned: Mapping[int, Mapping[int, tuple[int, ...]]]) -> list[str]:
    return [
        f"slot {r.slot} consumed samples in step {r.step} that were not planned for it"
        for r in kept
        if planned.get(r.step, {}).get(r.dp_rank) != r.sample_ids
    ]


def _missing_or_double(
    kept: list[Record], planned: Mapping[int, Mapping[int, tuple[int, ...]]], slots: int | None
) -> list[str]:
    """All slots of a data-parallel rank work on the same samples: each must have done so once per step."""
    times = Counter((r.step, r.slot) for r in kept)
    expected = range(slots) if slots is not None else sorted({r.slot for r in kept})
    found = [f"data-parallel rank {rank} consumed nothing" for rank in _ranks(planned) - {r.dp_rank for r in kept}]
    for step in sorted(planned):
        for slot in expected:
            if times[step, slot] != 1:
                found.append(f"slot {slot} consumed the samples of step {step} {times[step, slot]} times")
    return found


def _ranks(planned: Mapping[int, Mapping[int, tuple[int, ...]]]) -> set[int]:
    return {rank for by_rank in planned.values() for rank in by_rank}


def _disagreeing(kept: Iterable[Record]) -> list[str]:
    """Slots of one data-parallel rank that see the loss must see the same."""
    seen: dict[tuple[int, int], str] = {}
    found = []
    for r in kept:
        if r.loss is not None and seen.setdefault((r.step, r.dp_rank), r.loss) != r.loss:
            found.append(f"the slots of data-parallel rank {r.dp_rank} disagree about the loss of step {r.step}")
    return found


def read_final(directory: Path) -> dict[int, dict[str, str]]:
    """Digests by slot and part of the state."""
    final = {}
    for path in sorted((directory / "final").glob("slot*.json")):
        content = json.loads(path.read_text())
        final[int(content["slot"])] = dict(content["digests"])
    return final
