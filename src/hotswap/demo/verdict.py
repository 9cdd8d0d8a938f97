"""Evidence of a run, and the comparison of two: identical to the last bit, or where they first differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.demo.options import TrainOptions
from hotswap.demo.records import History, merge, read_final, read_records, resume_points
from hotswap.demo.samples import planned_ids

PHASES = ("detect", "fence", "plan", "rebuild", "restore", "redo")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything a run has left that counts. ``final``: digests by slot and part of the state."""

    exit_code: int
    history: History
    final: Mapping[int, Mapping[str, str]]
    events: Sequence[Mapping[str, Any]]
    deaths: Sequence[Mapping[str, Any]]

    def final_sha256(self) -> str:
        """One hash over all digests of all slots."""
        return hashlib.sha256(
            json.dumps({str(k): v for k, v in self.final.items()}, sort_keys=True).encode()
        ).hexdigest()

    @property
    def generation(self) -> int:
        """The last one."""
        return max((int(e["generation"]) for e in self.events if "generation" in e), default=0)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One recovery as its victim's death saw it. Times in milliseconds, from the death on."""

    death: Mapping[str, Any]
    generation: int
    resume_step: int
    redone_steps: int
    phases_ms: Mapping[str, float]


def gather(directory: Path, events_path: Path, fault_log: Path, train: TrainOptions, exit_code: int) -> Evidence:
    """Read what the run below *directory* has left."""
    events, deaths = read_lines(events_path), read_lines(fault_log)
    shape = train.batch(train.layout.dp)
    planned = {
        step: {rank: tuple(planned_ids(shape, step, rank)) for rank in range(shape.dp_size)}
        for step in range(train.steps)
    }
    history = merge(read_records(directory), resume_points(events), planned, slots=train.layout.slots)
    return Evidence(exit_code=exit_code, history=history, final=read_final(directory), events=events, deaths=deaths)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file; none if there is no file. A line cut short by a kill is left out."""
    if not path.exists():
        return []
    data = path.read_text()
    return [json.loads(line) for line in data[: data.rfind("\n") + 1].splitlines()]


def first_difference(reference: Evidence, run: Evidence) -> str | None:
    """Where the two runs first differ, in words; None if they are identical."""
    return _loss_difference(reference.history, run.history) or _state_difference(reference.final, run.final)


def _loss_difference(reference: History, run: History) -> str | None:
    for kind, expected, found in (
        ("loss", reference.losses, run.losses),
        ("held-out loss", reference.held_out, run.held_out),
    ):
        for step in sorted({*expected, *found}):
            ranks = {*expected.get(step, {}), *found.get(step, {})}
            for rank in sorted(ranks):
                a, b = expected.get(step, {}).get(rank), found.get(step, {}).get(rank)
                if a != b:
                    return f"{kind} of step {step}, data-parallel rank {rank}: {_shown(b)} instead of {_shown(a)}"
    return None


def _shown(value: str | None) -> str:
    return "nothing" if value is None else f"{float.fromhex(value)!r}"


def _state_difference(reference: Mapping[int, Mapping[str, str]], run: Mapping[int, Mapping[str, str]]) -> str | None:
    for slot in sorted({*reference, *run}):
        if slot not in run or slot not in reference:
            return f"final state of slot {slot}: only one of the runs has it"
        for part in sorted({*reference[slot], *run[slot]}):
            if reference[slot].get(part) != run[slot].get(part):
                return f"final state of slot {slot}: {part}"
    return None


def recoveries(evidence: Evidence) -> list[Recovery]:
    """The recovery of each death that caused one."""
    found = []
    for death in evidence.deaths:
        died = float(death["time"])
        started = next(
            (e for e in evidence.events if e["event"] == "recovery_started" and float(e["time"]) >= died), None
        )
        if started is None or death["kind"] not in ("worker", "node"):
            continue
        done = next(
            (
                e
                for e in evidence.events
                if e["event"] == "recovery_done" and int(e["generation"]) >= int(started["generation"])
            ),
            None,
        )
        if done is not None:
            found.append(_recovery(death, started, done))
    return found


def _recovery(death: Mapping[str, Any], started: Mapping[str, Any], done: Mapping[str, Any]) -> Recovery:
    died = float(death["time"])
    phases = {"detect": 1000 * (float(started["time"]) - died)}
    phases.update({name: float(done["phases_ms"][name]) for name in PHASES[1:]})
    phases["total"] = 1000 * (float(done["time"]) - died)
    return Recovery(
        death=death,
        generation=int(done["generation"]),
        resume_step=int(done["resume_step"]),
        redone_steps=int(done["redone_steps"]),
        phases_ms={name: round(ms, 1) for name, ms in phases.items()},
    )


def expected_deaths(evidence: Evidence, wanted: int) -> str | None:
    """What is wrong with the killing itself, None if everything that should die did."""
    if len(evidence.deaths) == wanted:
        return None
    return f"{len(evidence.deaths)} of {wanted} ordered deaths happened"


def recovered(evidence: Evidence) -> bool:
    """The job went to its end although something died, and every death of a worker or node was answered by a recovery."""
    answered = len(recoveries(evidence))
    return evidence.exit_code == 0 and answered == sum(death["kind"] in ("worker", "node") for death in evidence.deaths)
