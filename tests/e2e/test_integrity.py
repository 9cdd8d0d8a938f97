"""A bit that flips in one slot's memory: found by comparison with its peers, named, and undone from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_harness import DDP, Cell, Outcome, Program, Runner, assert_clean, assert_identical

from hotswap.session.faults import Fault

pytestmark = pytest.mark.e2e
Reference = Callable[[Cell], Outcome]


def flipped(program: Program, scope: str, *, slot: int = 1, every: int = 1, step: int = 3, **more: int) -> Cell:
    """Flipped during backward, so that the gradients of everybody are wrong as well."""
    fault = Fault(step=step, moment="backward", slot=slot, scope=scope, **more)
    return Cell(program=program, faults=(fault,), run_arguments=("--integrity-every", str(every)))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("scope", ["flip-bit", "flip-moment"])
def test_the_odd_slot_of_three_is_named_and_repaired_from_its_peers(
    scope: str, every: int, run: Runner, reference_of: Reference
) -> None:
    cell = flipped(DDP, scope, every=every)
    outcome = run(cell)
    assert_identical(outcome, reference_of(cell))
    assert_clean(outcome)
    (found,) = outcome.named("state_differs")
    assert (found["odd"], found["undecided"], found["nodes"]) == ([1], [], ["node1#1"])
    assert found["verified"] < 3 <= found["step"], found
    assert ("state" in found["detail"]) == (scope == "flip-moment"), found
    (lost,) = outcome.named("worker_lost")
    assert lost["slot"] == 1 and lost["detail"].startswith("its state differs from that of its peers"), lost
    planned = outcome.named("recovery_planned")[-1]
    assert planned["resume_step"] == found["verified"]
    assert planned["sources"]["1"] == "replica", planned
