"""Megatron-Core, tensor 2 x pipeline 2 x data 2 with dropout: later states are those of the undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest
from state_fleet import Template
from test_torch_swaps import fail, require_identical, require_shared_is_shared

WORLD = 8
SEVERAL = [
    fail(0, "forward", 1, nth=3),
    fail(1, "backward", 4, nth=3),
    fail(1, "reduce", 5, 7),
    fail(1, "scatter", 3),
    fail(2, "reduced", 0),
    fail(2, "prestep", 2, 6),
]


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "overlap": True},
        {"bf16": True},
        {"overlap": True},
        {},
        {"bf16": True, "distributed": False},
        {"distributed": False, "overlap": True},
        {"fp16": True},
        {"bf16": True, "recompute": True},
        {"vpp": 2, "overlap": True},
    ],
    ids=lambda options: "-".join(options) or "fp32",
)
def test_every_state_after_swaps_is_that_of_the_undisturbed_run(
    megatron_fleet: Template, options: dict[str, Any]
) -> None:
    results = megatron_fleet.run("swaps", WORLD, program="megatron", failures=SEVERAL, steps=3, options=options)
    require_identical(results, SEVERAL)
    require_shared_is_shared(results)
    sharded = options.get("distributed", True)
    assert all((r["shared_nbytes"] == 0) is sharded for r in results)


def test_a_survivor_can_load_everything(megatron_fleet: Template) -> None:
    failures = [fail(1, "reduce", 3)]
    results = megatron_fleet.run(
        "swaps", WORLD, program="megatron", failures=failures, steps=2, heavy=True, options={"bf16": True}
    )
    require_identical(results, failures)


def test_every_slot_has_a_shape_of_its_own(megatron_fleet: Template) -> None:
    """Sharding and vocabulary ranges depend on the place in the mesh, so a program cannot be moved to another slot."""
    results = megatron_fleet.run("swaps", WORLD, program="megatron", failures=[], steps=0)
    assert len({r["shape"] for r in results}) == WORLD


@pytest.mark.parametrize(
    ("at", "nth", "options"),
    [
        ("forward", 6, {"overlap": True}),
        ("backward", 7, {"overlap": True}),
        ("reduce", 1, {"overlap": True}),
        ("reduced", 1, {}),
        ("forward", 6, {"recompute": True}),
    ],
)
def test_nothing_of_a_failed_attempt_is_left(
    megatron_fleet: Template, at: str, nth: int, options: dict[str, Any]
) -> None:
    dirty: set[str] = set()
    for result in megatron_fleet.run("residue", WORLD, program="megatron", at=at, nth=nth, options=options):
        assert result["after"] == result["clean"]
        assert result["gradients"] == []
        dirty |= {name for name in result["clean"] if result["before"].get(name) != result["clean"][name]}
    assert dirty, "the failure left nothing, so this tests nothing"


def test_a_reduction_in_flight_must_not_be_kept(megatron_fleet: Template) -> None:
    """With this item of reset taken out, the job does not recover: it hangs, fails or goes another way."""
    failures = [fail(1, "reduce", 1)]
    with pytest.raises(AssertionError, match=r"rank \d"):
        results = megatron_fleet.run(
            "swaps",
            WORLD,
            program="megatron",
            failures=failures,
            steps=2,
            keep="reduce_handle",
            timeout_s=2.0,
            options={"overlap": True},
        )
        require_identical(results, failures)
