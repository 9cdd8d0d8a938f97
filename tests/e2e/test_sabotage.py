"""The tests of this folder bite: with its mechanism broken, a cell that is identical otherwise is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import FSDP2, SCRIPTS, Cell, Outcome, Runner, assert_identical, assert_recovered

from hotswap.errors import EXIT_REQUEUE
from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
NODE = (Fault(step=3, moment="backward", slot=0, scope="node"),)
WORKER_IN_UPDATE = (Fault(step=3, moment="optimizer", slot=0),)
THEN_THE_OTHER = (*NODE, Fault(step=3, moment="backward", slot=2, scope="node", generation=2))
Reference = Callable[[Cell], Outcome]


def in_workers(cell: Cell, name: str) -> Cell:
    script = (str(HERE / "scripts" / "sabotaged.py"), name, str(SCRIPTS / cell.program.script))
    return replace(cell, script=script)


def in_agents(cell: Cell, name: str) -> Cell:
    path = os.pathsep.join(filter(None, (str(HERE / "sabotage"), os.environ.get("PYTHONPATH"))))
    return replace(cell, environment={"PYTHONPATH": path, "HOTSWAP_E2E_BREAK_AGENTS": name})


@pytest.mark.parametrize(
    ("name", "faults", "differing"),
    [("random_states", NODE, "random"), ("undo", WORKER_IN_UPDATE, "model"), ("one_bit", NODE, "model")],
)
def test_wrong_state_is_seen(
    name: str, faults: tuple[Fault, ...], differing: str, run: Runner, reference_of: Reference
) -> None:
    cell = Cell(program=FSDP2, faults=faults)
    outcome = run(in_workers(cell, name))
    # It goes through all the motions ...
    assert outcome.exit_code == 0, outcome.story
    assert_recovered(outcome)
    # ... and computes something else.
    with pytest.raises(AssertionError):
        assert_identical(outcome, reference_of(cell))
    final = reference_of(cell).final
    assert any(outcome.final[slot][differing] != final[slot][differing] for slot in final)


def test_a_forgotten_replication_loses_the_job(run: Runner) -> None:
    outcome = run(in_agents(Cell(program=FSDP2, spares=2, faults=THEN_THE_OTHER), "replication_again"))
    assert outcome.exit_code == EXIT_REQUEUE, outcome.story
