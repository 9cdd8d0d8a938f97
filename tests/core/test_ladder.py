"""The table of what is tried before a job is given up is what the coordinator goes by."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from scenario import Scenario

from hotswap.core import ladder
from hotswap.core.limits import Limits

LIMITS = Limits(nodes_active=2, nodes_max=3, width=1)
RUNGS = {rung.name: rung for rung in ladder.LADDER}


def test_every_rung_has_a_bound_and_leads_further_down_or_to_an_end() -> None:
    names = list(RUNGS)
    for index, rung in enumerate(ladder.LADDER):
        assert rung.budget in {field.name for field in fields(Limits)}
        assert (rung.then == "end") == (rung.exit_code is not None)
        if rung.exit_code is None:
            assert names.index(rung.then) > index
        else:
            assert rung.code == rung.exit_code in (75, 93)


def test_the_table_says_the_bounds_of_this_job() -> None:
    rows = {row["rung"]: row for row in ladder.table(replace(LIMITS, respawns_max=7, spare_wait_s=5.0))}
    assert rows["respawn"]["bound"] == "7 times per slot, anew with a newly committed step"
    assert rows["wait"]["bound"] == "5 s per wait, anew with fewer nodes missing than before"
    ends = {name: rows[name]["then"] for name in ("respawn", "rescue", "fewer", "no progress")}
    assert ends == {"respawn": "spare", "rescue": "fewer", "fewer": "exit 75", "no progress": "exit 93"}
    assert rows["fewer"]["bound"] == "never, without --min-nodes"
    (fewer,) = (row for row in ladder.table(replace(LIMITS, nodes_min=1)) if row["rung"] == "fewer")
    assert fewer["bound"] == "1 nodes at least"


def climb(job: str, *lines: str) -> str:
    return Scenario("\n".join(f"> {line}" for line in (f"job trains detection_budget_s=500 {job}", *lines))).run()


@pytest.mark.parametrize("respawns", [1, 2, 3])
def test_from_a_new_process_to_a_spare_to_waiting_to_the_end(respawns: int) -> None:
    flags = f"nodes_active=2 nodes_max=3 width=1 checkpoints=1 respawns_max={respawns}"
    losses = ["n1 loses 0 killed"] * (respawns + 1)
    told = climb(
        flags, *losses, "n3 gone", "n2 fenced own=1@6 replica=0@6", "tick", "n2 writes 0@6 1@6 gen=1", "n2 commits 6"
    )
    inputs = [part.splitlines() for part in told.split("> ")[2:]]
    first, spare, gone = inputs[:respawns], inputs[respawns], inputs[respawns + 1]
    assert all(any("recovery_started" in line for line in part) for part in first)
    assert not any("spare_promoted" in line for part in first for line in part)
    assert any("spare_promoted node=n3 replaces=n1" in line for line in spare)
    assert any("waiting_for_node" in line for line in gone)
    assert any("rescue_started" in line for line in inputs[respawns + 3])
    assert any(f"exit {ladder.FEWER.code}" in line for line in inputs[-1])


@pytest.mark.parametrize("most", [1, 4])
def test_recoveries_without_progress_end_the_job_for_good(most: int) -> None:
    one = ["n1 troubled 0 reset by peer", "tick", "quietly all fenced", "quietly all connected", "quietly all ready"]
    flags = f"nodes_active=2 nodes_max=2 width=1 recoveries_max={most} trouble_grace_s=0.5"
    told = climb(flags, *one * most, "n1 troubled 0 reset by peer")
    assert "exit" not in told
    assert f"exit {ladder.NO_PROGRESS.code}" in climb(flags, *one * most, "n1 troubled 0 reset by peer", "tick")
