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
    sharded = options.get("distributed", True)
    failures = [failure for failure in SEVERAL if sharded or failure["at"] != "scatter"]
    results = megatron_fleet.run("swaps", WORLD, program="megatron", failures=failures, steps=3, options=options)
    require_identical(results, failures)
    require_shared_is_shared(results)
    assert all((r["shared_nbytes"] == 0) is sharded for r in results)


def test_a_survivor_can_load_everything(megatron_fleet: Template) -> None:
    failures = [fail(1, "reduce", 3)]
    results = megatron_fleet.run(
        "swaps", WORLD, program="megatron", failures=failures, steps=2, heavy=True, options={"bf16": True}
    )
    require_identical(results, failures)


def test_every_slot_has_a_shape_of_its_own(megatron_fleet: Template) -> None:
    """Sharding and vocabulary ranges depend on the place in the mesh, so a program cannot be moved to another slot."""
    results = megatron_fleet.run("swaps", WORLD, program="megatron", failures=[], steps=1)
    assert len({r["shape"] for r in results}) == WORLD
    # Those that do the same on other data have a role in common, and the same gathered parameters.
    groups = {tuple(group) for r in results for group, _ in r["compared"]}
    assert groups == {(0, 2), (1, 3), (4, 6), (5, 7)}
    for group in groups:
        assert len({results[rank]["role"] for rank in group}) == 1
        ((_, numbers),) = results[group[0]]["compared"]
        assert len(numbers) > 3 and all(results[rank]["compared"] == [[list(group), numbers]] for rank in group)
    assert len({r["role"] for r in results}) == len(groups)


@pytest.mark.parametrize(
    ("at", "nth", "options"),
    [
        ("forward", 6, {"overlap": True}),
        ("reduce", 1, {"overlap": True}),
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


@pytest.mark.parametrize(
    "options",
    [{"bf16": True, "overlap": True}, {"bf16": True, "distributed": False}, {"vpp": 2}],
    ids=lambda options: "-".join(options) or "fp32",
)
def test_training_is_bit_for_bit_that_of_ordinary_megatron(megatron_fleet: Template, options: dict[str, Any]) -> None:
    """Groups that connect late must not change what is computed: see the embeddings of the last stage."""
    ordinary = megatron_fleet.run("ordinary", WORLD, program="megatron", steps=2, options=options)
    assert megatron_fleet.run("captured", WORLD, program="megatron", steps=2, options=options) == ordinary


@pytest.mark.parametrize("options", [{"bf16": True}, {"distributed": False}], ids=str)
def test_a_first_start_makes_the_replicas_equal(megatron_fleet: Template, options: dict[str, Any]) -> None:
    results = megatron_fleet.run("started", WORLD, program="megatron", options=options)
    for left in (0, 1, 4, 5):  # ranks are tensor + 2 data + 4 pipeline
        assert results[left]["parameters"] == results[left + 2]["parameters"]
    require_shared_is_shared(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["config", "tp_comm_overlap", True], "switch them off"),
        (["model", 0, "ddp_config", "nccl_ub", True], "switch them off"),
        (["config", "cuda_graph_impl", "local"], "set cuda_graph_impl to 'none'"),
        (["config", "fp8", "hybrid"], "fp8 and fp4"),
    ],
    ids=lambda value: str(value[-2]) if isinstance(value, list) else "",
)
def test_megatron_options_that_are_not_supported(megatron_fleet: Template, change: list[Any], message: str) -> None:
    assert message in megatron_fleet.run("refused", WORLD, program="megatron", change=change)[0]
