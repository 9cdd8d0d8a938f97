"""One knob, and deadlines that cannot contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.config import Timing
from hotswap.errors import UsageError


@given(st.floats(0.5, 100.0))
def test_every_budget_gives_deadlines_in_their_order(budget_s: float) -> None:
    timing = Timing(detection_budget_s=budget_s)
    assert timing.heartbeat_s + timing.stopped_s <= budget_s / 2, "a stopped worker is not taken for a silent node"
    assert timing.trouble_grace_s < budget_s < timing.phase_s
    assert timing.abort_s < timing.park_s < timing.phase_s < timing.coordinator_s
    assert budget_s < timing.hang_floor_s <= timing.hang_ceiling_s < timing.collective_timeout_s
    seconds = [row[1] for row in timing.table()]
    assert seconds == sorted(seconds)


def test_the_default_notices_a_silent_node_within_two_seconds() -> None:
    assert Timing().detection_budget_s == 2.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"detection_budget_s": 0.1}, "under 0.5 s every pause of a scheduler"),
        ({"detection_budget_s": float("nan")}, "--detection-budget-s nan"),
        ({"hang_s": 2.0}, "--hang-budget-s 2 must be longer than the detection budget"),
        ({"hang_s": float("inf")}, "'off' looks for no hangs"),
        ({"hang_s": 100.0, "collective_s": 110.0}, "at least 125 s are needed"),
        ({"collective_s": 30.0}, "at least 75 s are needed, or a shorter --hang-budget-s than 60 s"),
        ({"collective_s": float("nan")}, "--collective-timeout-s nan"),
        ({"pause_s": 5.0}, "--pause-limit-s 5 must not be shorter than the hang budget \\(60 s\\)"),
        ({"pause_s": float("nan")}, "--pause-limit-s nan"),
    ],
)
def test_an_inverted_hierarchy_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Timing(**fields)


def test_what_is_not_used_is_not_in_the_table() -> None:
    names = [row[0] for row in Timing(hang_s=0).table()]
    assert "hang" not in names and "pause" not in names
    rows = {name: seconds for name, seconds, _ in Timing(hang_s=10, pause_s=50, collective_s=20).table()}
    assert (rows["hang"], rows["pause"], rows["collective"]) == (10, 50, 20)
