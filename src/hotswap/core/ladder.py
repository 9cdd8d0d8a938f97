"""What is tried before a job is given up, as a table: from what costs least to what costs most, each with a bound.

The coordinator asks the rungs here whether they are used up, and ends jobs with the codes that stand here; ``hotswap doctor``
prints the table. Who is on which rung is decided where the loss is handled.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.core.limits import Limits
from hotswap.errors import EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE


@dataclass(frozen=True, kw_only=True)
class Rung:
    """*budget*: the field of Limits that bounds it, per *per*; it begins anew with *renewed*. *then*: the next rung, or the end.

    ``exit_code``: of a job that ends here, None if it goes on.
    """

    name: str
    answers: str
    does: str
    budget: str
    per: str
    renewed: str
    then: str
    exit_code: int | None = None

    @property
    def code(self) -> int:
        """The exit code of a job that ends here."""
        assert self.exit_code is not None, f"no job ends with '{self.name}'"
        return self.exit_code

    def has_room(self, limits: Limits, used: int) -> bool:
        """Whether this may be done for the *used*-th time."""
        return used <= int(getattr(limits, self.budget))

    def bound(self, limits: Limits) -> str:
        """The budget in words."""
        value = getattr(limits, self.budget)
        if self.budget.startswith("nodes_"):
            return f"{value} nodes at least" if value else "never, without --min-nodes"
        return f"{value:g} s" if self.budget.endswith("_s") else f"{value} times"


A_STEP = "a newly committed step"
IN_PLACE = Rung(
    name="in place",
    answers="a collective failed, a group or a source did not answer, though nobody is lost",
    does="the same processes form their groups anew; torn state comes from the own snapshot",
    budget="recoveries_max",
    per="job, all recoveries together",
    renewed=A_STEP,
    then="no progress",
)
RESPAWN = Rung(
    name="respawn",
    answers="a worker is lost, or hangs",
    does="a new process on the node takes the state from the node's memory; where --worker-loss says so, a ready spare goes first",
    budget="respawns_max",
    per="slot",
    renewed=A_STEP,
    then="spare",
)
SPARE = Rung(
    name="spare",
    answers="a node is lost, silent, cut off or late; its respawns are used up; a worker hung there again; it has to leave",
    does="a spare takes the place, the state comes from the holder",
    budget="recoveries_max",
    per="job, all recoveries together",
    renewed=A_STEP,
    then="wait",
)
WAIT = Rung(
    name="wait",
    answers="there is no spare",
    does="the survivors keep what they have, and the first node that joins takes the place",
    budget="spare_wait_s",
    per="wait",
    renewed="fewer nodes missing than before",
    then="rescue",
)
RESCUE = Rung(
    name="rescue",
    answers="no node came",
    does="with --checkpoint-dir, the newest state that is whole in memory goes to storage",
    budget="phase_s",
    per="wait",
    renewed="",
    then="fewer",
)
FEWER = Rung(
    name="fewer",
    answers="no node came, and the state is on storage or cannot be had there",
    does="with --min-nodes, all processes start anew with the largest part of the nodes that divides their number, from storage, and "
    "with all again as nodes come; else the job ends and can be queued again",
    budget="nodes_min",
    per="",
    renewed="",
    then="end",
    exit_code=EXIT_REQUEUE,
)
STANDSTILL = Rung(
    name="standstill",
    answers="a hang at the same step, after a new process and another node",
    does="the job ends: it would hang again",
    budget="hangs_max",
    per="slot and step",
    renewed="another step",
    then="end",
    exit_code=EXIT_DO_NOT_REQUEUE,
)
NO_PROGRESS = Rung(
    name="no progress",
    answers="recovery after recovery, and no step is committed",
    does="the job ends: another try would come no further",
    budget="recoveries_max",
    per="job, all recoveries together",
    renewed=A_STEP,
    then="end",
    exit_code=EXIT_DO_NOT_REQUEUE,
)
LADDER = (IN_PLACE, RESPAWN, SPARE, WAIT, RESCUE, FEWER, STANDSTILL, NO_PROGRESS)


def table(limits: Limits) -> list[dict[str, str]]:
    """One row a rung, in words, with the bounds of *limits*."""
    return [
        {
            "rung": rung.name,
            "answers": rung.answers,
            "does": rung.does,
            "bound": rung.bound(limits)
            + (f" per {rung.per}" if rung.per else "")
            + (f", anew with {rung.renewed}" if rung.renewed else ""),
            "then": f"exit {rung.exit_code}" if rung.exit_code is not None else rung.then,
        }
        for rung in LADDER
    ]
