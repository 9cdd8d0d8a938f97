"""Each slot and each node dies once at each moment of a step; the job must come out as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_harness import (
    DDP,
    FSDP2,
    MEGATRON,
    MEGATRON_BF16,
    MEGATRON_INTERLEAVED,
    MEGATRON_SEQUENCE,
    Cell,
    Outcome,
    Program,
    Runner,
    assert_identical,
    assert_recovered,
)

from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
STEP = 3


def _victims(program: Program) -> list[tuple[str, int]]:
    """Every slot as a worker, and every node through one of its slots."""
    slots = program.nodes * program.width
    workers = [("worker", slot) for slot in range(slots)]
    nodes = [("node", position * program.width + position % program.width) for position in range(program.nodes)]
    return [*nodes, *workers]


def _cells() -> list[object]:
    """The whole matrix; every victim and every moment is in the covering subset, but for the victims of the second Megatron program."""
    cells: list[object] = []
    for program in (MEGATRON, MEGATRON_BF16, FSDP2, DDP):
        victims, moments = _victims(program), program.moments
        rounds = len(moments) if program is MEGATRON_BF16 else max(len(victims), len(moments))
        covering = {(index % len(victims), index % len(moments)) for index in range(rounds)}
        for row, (scope, slot) in enumerate(victims):
            for column, moment in enumerate(moments):
                marks = [] if (row, column) in covering else [pytest.mark.full_matrix]
                name = f"{program.name}-{scope}-of-slot{slot}-{moment}"
                cells.append(pytest.param(program, scope, slot, moment, id=name, marks=marks))
    return cells


def _fault(program: Program, scope: str, slot: int, moment: str) -> Fault:
    middle = program.train.microbatches // 2 if moment in ("forward", "backward") else 0
    return Fault(step=STEP, moment=moment, slot=slot, scope=scope, occurrence=middle)


@pytest.mark.parametrize(("program", "scope", "slot", "moment"), _cells())
def test_one_death(
    program: Program, scope: str, slot: int, moment: str, run: Runner, reference_of: Callable[[Cell], Outcome]
) -> None:
    cell = Cell(program=program, faults=(_fault(program, scope, slot, moment),))
    outcome = run(cell)
    assert [(death["kind"], death["slot"]) for death in outcome.deaths] == [(scope, slot)], outcome.story
    assert_identical(outcome, reference_of(cell))
    assert_recovered(outcome)
    planned = outcome.named("recovery_planned")[-1]
    promoted = outcome.named("spare_promoted")
    position = slot // program.width
    if scope == "worker":
        # Its successor starts on the same node, from the memory that the agent has kept.
        assert promoted == []
        assert planned["sources"][str(slot)] == "own"
    else:
        assert [event["position"] for event in promoted] == [position]
        lost = range(position * program.width, (position + 1) * program.width)
        assert {planned["sources"][str(slot)] for slot in lost} == {"replica"}


@pytest.mark.full_matrix
@pytest.mark.parametrize("program", [MEGATRON_SEQUENCE, MEGATRON_INTERLEAVED], ids=lambda program: program.name)
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
def test_a_node_dies_in_other_layouts(
    program: Program, moment: str, run: Runner, reference_of: Callable[[Cell], Outcome]
) -> None:
    cell = Cell(program=program, faults=(_fault(program, "node", program.width, moment),))
    outcome = run(cell)
    assert_recovered(outcome)
    assert_identical(outcome, reference_of(cell))
