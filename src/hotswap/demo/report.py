"""The end of a demonstration: for people a table, a chart and a verdict; for programs one JSON object."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotswap import __version__
from hotswap.demo import chart, verdict
from hotswap.demo.plan import Plan
from hotswap.demo.verdict import PHASES, Evidence


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Both runs, and what the comparison says. ``complaint``: why this is not a success, None if it is one."""

    plan: Plan
    reference: Evidence
    run: Evidence
    difference: str | None
    complaint: str | None

    @property
    def identical(self) -> bool:
        """No difference in any loss or any part of the final state."""
        return self.difference is None


def judge(plan: Plan, reference: Evidence, run: Evidence) -> Outcome:
    """Compare, and look for everything else that would make the comparison worthless."""
    difference = verdict.first_difference(reference, run)
    complaints = [
        "the reference run did not end well" if reference.exit_code else None,
        f"the run ended with {run.exit_code}" if run.exit_code else None,
        verdict.expected_deaths(run, len(plan.faults) + len(plan.outside)),
        None if verdict.recovered(run) else "not every death was followed by a recovery",
        _incomplete(plan, reference),
        *(run.history.faults[:1]),
        *(reference.history.faults[:1]),
    ]
    complaint = next((text for text in complaints if text), None)
    return Outcome(plan=plan, reference=reference, run=run, difference=difference, complaint=complaint)


def _incomplete(plan: Plan, reference: Evidence) -> str | None:
    """Two empty runs are identical, too."""
    steps, slots = len(reference.history.losses), len(reference.final)
    if steps != plan.train.steps or slots != plan.train.layout.slots:
        return f"the reference run shows {steps} of {plan.train.steps} steps and {slots} of {plan.train.layout.slots} slots"
    return None


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The JSON report. Times in milliseconds; ``phases_ms`` is null where nothing had to be recovered."""
    run, found = outcome.run, verdict.recoveries(outcome.run)
    return {
        "recovered": verdict.recovered(run),
        "identical": outcome.identical,
        "first_difference": outcome.difference,
        "complaint": outcome.complaint,
        "redone_steps": sum(item.redone_steps for item in found),
        "generation": run.generation,
        "phases_ms": dict(found[0].phases_ms) if found else None,
        "recoveries": [
            {
                "generation": r.generation,
                "resume_step": r.resume_step,
                "redone_steps": r.redone_steps,
                "phases_ms": dict(r.phases_ms),
            }
            for r in found
        ],
        "deaths": [dict(death) for death in run.deaths],
        "final_state_sha256": run.final_sha256(),
        "reference_sha256": outcome.reference.final_sha256(),
        "losses": run.history.mean_losses(),
        "reference_losses": outcome.reference.history.mean_losses(),
        "held_out_losses": {str(step): loss for step, loss in run.history.mean_held_out().items()},
        "samples_exactly_once": not run.history.faults,
        "config": outcome.plan.describe(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of everything the numbers depend on."""
    found = {"hotswap": __version__, "python": platform.python_version()}
    for package in ("torch", "megatron-core"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def for_people(outcome: Outcome) -> RenderableType:
    """Table, chart and verdict."""
    reference, run = outcome.reference.history.mean_losses(), outcome.run.history.mean_losses()
    mark = outcome.plan.step if outcome.plan.kill != "none" else None
    lines = chart.draw(reference, run, mark=mark)
    return Group(
        *_phases(outcome), Text("\n".join(["", "loss, mean over data-parallel ranks", *lines, ""])), *_verdict(outcome)
    )


def _phases(outcome: Outcome) -> list[RenderableType]:
    found = verdict.recoveries(outcome.run)
    if not found:
        return []
    table = Table(title="recovery, ms from the death on", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("generation", *PHASES, "total", "redone steps"):
        table.add_column(name, justify="right")
    for item in found:
        times = [f"{item.phases_ms[name]:.0f}" for name in (*PHASES, "total")]
        table.add_row(str(item.generation), *times, str(item.redone_steps))
    return [Text(), table]


def _verdict(outcome: Outcome) -> list[RenderableType]:
    run = outcome.run
    losses = sum(len(by_rank) for by_rank in run.history.losses.values())
    lines = [
        Text(f"samples   {'each consumed exactly once' if not run.history.faults else run.history.faults[0]}"),
        Text(f"compared  {losses} losses, {len(run.final)} slots' parameters, optimizer, random and loader state"),
        Text(f"state     {run.final_sha256()[:16]} (undisturbed: {outcome.reference.final_sha256()[:16]})"),
    ]
    if outcome.difference is not None:
        lines.append(Text(f"verdict   different (first difference at {outcome.difference})", style="bold red"))
    else:
        lines.append(Text("verdict   identical", style="bold green"))
    if outcome.complaint:
        lines.append(Text(f"but       {outcome.complaint}", style="bold red"))
    return list(lines)
