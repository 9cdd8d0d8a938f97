"""Runs the cells of the matrix, one job after the other, and says how each came out."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotswap.chaos.cuts import Cut, run_on_hosts
from hotswap.chaos.network import obstacle
from hotswap.chaos.servers import ForkServers
from hotswap.chaos.suite import Cell, Ordeal, job_of
from hotswap.demo.runner import JobSpec, explain_failure, run_job
from hotswap.demo.verdict import Evidence, first_difference, gather
from hotswap.errors import EXIT_OK, UsageError

CELL_S_MAX = 180.0
IDENTICAL, STOPPED, DIFFERENT, WRONG, HUNG, MISSED = "identical", "stopped", "DIFFERENT", "WRONG END", "HUNG", "MISSED"
WRONG_VERDICT, NEEDLESS, SKIPPED = "WRONG VERDICT", "NEEDLESS LOSS", "skipped"
"""As it had to be: the first two. MISSED: what should have struck did not, so that the cell says nothing. WRONG_VERDICT: the job
came out as it had to, but said that something else broke. NEEDLESS: somebody was given up although nobody had to be. SKIPPED: it
cannot be run on this machine, which is neither good nor bad."""
GOOD = (IDENTICAL, STOPPED)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one job came out. ``redone``: steps that were done again, in part.

    ``verdict``: what the job said broke, and ``right_verdict``: whether that is so; None if there was no job.
    """

    layout: str
    drill: str
    outcome: str
    detail: str
    seconds: float
    recoveries: int
    recovery_ms: float | None
    redone: int
    verdict: str
    right_verdict: bool | None

    @property
    def good(self) -> bool:
        """Whether the job did what it has to do."""
        return self.outcome in GOOD

    @property
    def bad(self) -> bool:
        """Whether there was a job that did something else."""
        return not self.good and self.outcome != SKIPPED


class Matrix:
    """Jobs below *directory*; what an undisturbed job of each layout does is found out once."""

    def __init__(
        self,
        directory: Path,
        servers: ForkServers,
        *,
        keep: bool,
        run: Callable[[JobSpec], int] = run_job,
        run_apart: Callable[[JobSpec, Sequence[Cut]], int] = run_on_hosts,
        unable: Callable[[bool], str] = obstacle,
    ) -> None:
        """*keep*: also what the good jobs have left.

        *run* and *run_apart*: a job on this machine, and one on hosts of its own. *unable*: why the latter cannot be had here,
        asked with whether a link has to be narrowed, or an empty text.
        """
        self._directory = directory
        self._servers = servers
        self._keep = keep
        self._run = run
        self._run_apart = run_apart
        self._unable = functools.cache(unable)
        self._references: dict[tuple[str, int], Evidence] = {}

    def measure(self, cells: Sequence[Cell], notice: Callable[[Outcome], None]) -> list[Outcome]:
        """Every cell's outcome, in order; *notice* is told at once."""
        found = []
        for cell in cells:
            found.append(self._cell(cell))
            notice(found[-1])
        return found

    def _cell(self, cell: Cell) -> Outcome:
        cuts = cell.ordeal.cuts
        if cuts and (reason := self._unable(any(cut.kbit_per_s for cut in cuts))):
            return _skipped(cell, reason)
        reference = self._reference(cell)
        spec = job_of(cell, self._directory / f"{cell.drill}-on-{cell.layout}", CELL_S_MAX)
        began = time.monotonic()
        try:
            code = self._job(cell, spec)
        except (TimeoutError, UsageError) as error:
            hung = isinstance(error, TimeoutError)
            return self._outcome(
                cell, _evidence(spec, -1), HUNG if hung else MISSED, str(error), time.monotonic() - began
            )
        evidence = _evidence(spec, code)
        outcome, detail = judge(cell.ordeal, reference, evidence)
        if outcome in GOOD and (wrong := judge_verdicts(cell.ordeal, evidence.events)):
            outcome, detail = WRONG_VERDICT, wrong
        if outcome == WRONG:
            detail = f"{detail}: {explain_failure(spec, evidence.events)}"
        if outcome in GOOD and not self._keep:
            shutil.rmtree(spec.directory, ignore_errors=True)
        return self._outcome(cell, evidence, outcome, detail, time.monotonic() - began)

    def _job(self, cell: Cell, spec: JobSpec) -> int:
        if cell.ordeal.cuts:
            return self._run_apart(spec, cell.ordeal.cuts)
        with self._servers.of(cell.program.framework):
            return self._run(spec)

    def _reference(self, cell: Cell) -> Evidence:
        key = cell.layout, cell.ordeal.steps
        if key not in self._references:
            undisturbed = Cell(layout=cell.layout, drill="none", ordeal=Ordeal(spares=0, steps=cell.ordeal.steps))
            name = f"reference-{cell.layout}" + (f"-{cell.ordeal.steps}-steps" if cell.ordeal.steps else "")
            spec = job_of(undisturbed, self._directory / name, CELL_S_MAX)
            code = self._job(undisturbed, spec)
            evidence = _evidence(spec, code)
            if code != EXIT_OK:
                raise UsageError(
                    f"the undisturbed job of {cell.layout} ended with {code}: {explain_failure(spec, evidence.events)}"
                )
            self._references[key] = evidence
        return self._references[key]

    def _outcome(self, cell: Cell, evidence: Evidence, outcome: str, detail: str, seconds: float) -> Outcome:
        done = [event for event in evidence.events if event["event"] == "recovery_done" and event["cause"] != "start"]
        return Outcome(
            layout=cell.layout,
            drill=cell.drill,
            outcome=outcome,
            detail=detail,
            seconds=round(seconds, 1),
            recoveries=len(done),
            recovery_ms=max((float(event["phases_ms"]["total"]) for event in done), default=None),
            redone=sum(int(event["redone_steps"]) for event in done),
            verdict=", ".join(_said(event) for event in evidence.events if event["event"] == "diagnosed"),
            right_verdict=not judge_verdicts(cell.ordeal, evidence.events),
        )


def judge(ordeal: Ordeal, reference: Evidence, evidence: Evidence) -> tuple[str, str]:
    """What has become of a job that came to its end, and why it is called so."""
    wanted, struck = len(ordeal.inside) + len(ordeal.outside) + len(ordeal.cuts), len(evidence.deaths)
    if evidence.exit_code != ordeal.exit_code:
        return WRONG, f"exit code {evidence.exit_code} instead of {ordeal.exit_code}"
    if ordeal.exit_code != EXIT_OK:
        reason = next((str(e["reason"]) for e in evidence.events if e["event"] == "job_stopped"), "")
        return (STOPPED, reason) if struck else (MISSED, "nothing struck")
    differences = [first_difference(reference, evidence), *evidence.history.faults]
    if any(differences):
        return DIFFERENT, next(difference for difference in differences if difference)
    if struck != wanted:
        return MISSED, f"{struck} of {wanted} faults struck"
    lost = [event for event in evidence.events if event["event"] in ("node_lost", "worker_lost")]
    if ordeal.harmless and lost:
        return NEEDLESS, f"{lost[0]['event']}: {lost[0].get('node', '')}, {lost[0].get('reason', '')}"
    answered = any(event["event"] == "recovery_done" and event["cause"] != "start" for event in evidence.events)
    return (IDENTICAL, "") if answered or ordeal.harmless else (MISSED, "nothing had to be recovered")


def _skipped(cell: Cell, reason: str) -> Outcome:
    return Outcome(
        layout=cell.layout,
        drill=cell.drill,
        outcome=SKIPPED,
        detail=reason,
        seconds=0.0,
        recoveries=0,
        recovery_ms=None,
        redone=0,
        verdict="",
        right_verdict=None,
    )


def judge_verdicts(ordeal: Ordeal, events: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with what the job said of its faults; empty if all is right."""
    said = [event for event in events if event["event"] == "diagnosed"]
    wrong = [_said(event) for event in said if not any(truth.fits(event) for truth in ordeal.truths)]
    unsaid = [str(truth) for truth in ordeal.truths if truth.must and not any(truth.fits(event) for event in said)]
    wanted = f" instead of {', '.join(map(str, ordeal.truths)) or 'nothing'}"
    return f"said {', '.join(wrong)}{wanted}" if wrong else f"did not say {', '.join(unsaid)}" if unsaid else ""


def _said(event: Mapping[str, Any]) -> str:
    culprit = event["culprit"]
    rank = f"slot {culprit['rank']}" if "rank" in culprit else ""
    of = " on ".join(part for part in (rank, culprit.get("node", "")) if part)
    return f"{event['verdict']} of {of}" if of else str(event["verdict"])


def _evidence(spec: JobSpec, code: int) -> Evidence:
    return gather(spec.directory, spec.logs / "events.jsonl", spec.fault_log, spec.train, code)


def as_json(outcomes: Sequence[Outcome], versions: Mapping[str, str]) -> dict[str, Any]:
    """The whole result."""
    return {
        "versions": dict(versions),
        "cells": [asdict(outcome) for outcome in outcomes],
        "good": sum(outcome.good for outcome in outcomes),
        "bad": sum(outcome.bad for outcome in outcomes),
        "skipped": sum(outcome.outcome == SKIPPED for outcome in outcomes),
    }
