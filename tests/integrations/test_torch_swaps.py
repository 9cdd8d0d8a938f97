"""Plain torch, DDP, FSDP2 and HSDP: after failures and replacements every later state is that of the undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest
from state_fleet import Template

WORLD = 4


def fail(step: int, at: str | None, *victims: int, nth: int = 1, detached: bool = True) -> dict[str, Any]:
    return {"step": step, "at": at, "victims": victims, "nth": nth, "detached": detached}


def require_identical(results: list[dict[str, Any]], failures: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["raised"] == [failure["at"] is not None for failure in failures], f"rank {rank}"
        assert result["digests"] == result["reference"], f"rank {rank}"


def require_shared_is_shared(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        for peer in result["peers"]:
            assert results[peer]["shared"] == result["shared"], f"ranks {rank} and {peer}"


@pytest.mark.parametrize(("kind", "heavy"), [("plain", False), ("fsdp2", False), ("hsdp", False), ("hsdp", True)])
def test_every_state_after_swaps_is_that_of_the_undisturbed_run(torch_fleet: Template, kind: str, heavy: bool) -> None:
    failures = [
        fail(0, "forward", 1, nth=2),
        fail(1, "backward", 0, 2),
        fail(1, "backward", 3, nth=2),
        fail(2, "prestep", 3),
        fail(3, None, 0, 1, 2, 3),
    ]
    results = torch_fleet.run("swaps", WORLD, program=kind, failures=failures, steps=4, heavy=heavy)
    require_identical(results, failures)
    require_shared_is_shared(results)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_ddp_sums_in_the_order_of_the_undisturbed_run(torch_fleet: Template, options: dict[str, Any]) -> None:
    failures = [
        fail(0, "forward", 1),
        fail(0, "backward", 2, nth=2),
        fail(1, "backward", 0, nth=2),
        fail(1, None, 1),
        fail(2, "prestep", 3, detached=False),
    ]
    results = torch_fleet.run("swaps", WORLD, program="ddp", failures=failures, steps=4, options=options)
    require_identical(results, failures)
    require_shared_is_shared(results)
    assert results[0]["peers"] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_training_is_bit_for_bit_that_of_ordinary_torch(torch_fleet: Template, kind: str) -> None:
    """Also DDP's: the buckets that hotswap lets it agree on early are those it would have agreed on."""
    ordinary = torch_fleet.run("ordinary", WORLD, program=kind, steps=4)
    assert torch_fleet.run("captured", WORLD, program=kind, steps=4) == ordinary


def test_half_precision_state(torch_fleet: Template) -> None:
    failures = [fail(1, "backward", 1)]
    options = {"dtype": "bfloat16"}
    results = torch_fleet.run("swaps", WORLD, program="fsdp2", failures=failures, steps=3, options=options)
    require_identical(results, failures)


def test_who_holds_what(torch_fleet: Template) -> None:
    found = {
        kind: torch_fleet.run("swaps", WORLD, program=kind, failures=[], steps=1)
        for kind in ("plain", "ddp", "fsdp2", "hsdp")
    }
    assert [r["peers"] for r in found["hsdp"]] == [[2], [3], [0], [1]]
    assert [r["peers"] for r in found["ddp"]] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert all(r["peers"] == [] and r["shared_nbytes"] == 0 for r in found["plain"] + found["fsdp2"])
    assert len({r["shape"] for r in found["ddp"]}) == 1
    assert len({r["shape"] for r in found["fsdp2"]}) == WORLD
    assert all(len({r["role"] for r in results}) == 1 for results in found.values())
    # What peers share they can compare: all of it with DDP, a shard with HSDP, nothing where all is sharded.
    assert all(r["compared"] == [] for r in found["plain"] + found["fsdp2"])
    assert found["ddp"][0]["compared"][0][0] == [0, 1, 2, 3]
    assert all(r["compared"] == found["ddp"][0]["compared"] for r in found["ddp"])
    assert [r["compared"][0][0] for r in found["hsdp"]] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert found["hsdp"][0]["compared"] == found["hsdp"][2]["compared"] != found["hsdp"][1]["compared"]


@pytest.mark.parametrize(
    ("kind", "at", "nth"), [("fsdp2", "forward", 2), ("fsdp2", "backward", 1), ("hsdp", "backward", 2)]
)
def test_nothing_of_a_failed_attempt_is_left(torch_fleet: Template, kind: str, at: str, nth: int) -> None:
    for result in torch_fleet.run("residue", WORLD, program=kind, at=at, nth=nth):
        assert result["before"] != result["clean"], "the failure left nothing, so this tests nothing"
        assert result["after"] == result["clean"]
        assert result["gradients"] == []


@pytest.mark.parametrize(
    ("kind", "keep", "at", "nth"),
    [
        ("ddp", "reducer", "backward", 2),
        ("fsdp2", "fsdp_state", "backward", 1),
        ("fsdp2", "fsdp_callback", "backward", 1),
        ("fsdp2", "fsdp_gather", "backward", 1),
        ("fsdp2", "gradients", "forward", 2),
    ],
)
def test_what_reset_must_not_forget(torch_fleet: Template, kind: str, keep: str, at: str, nth: int) -> None:
    """With one item of reset taken out, the job does not recover: it hangs, fails or goes another way."""
    failures = [fail(1, at, 1, nth=nth)]
    with pytest.raises(AssertionError):
        results = torch_fleet.run("swaps", WORLD, program=kind, failures=failures, steps=3, keep=keep, timeout_s=2.0)
        require_identical(results, failures)


def test_a_first_start_makes_the_replicas_equal(torch_fleet: Template) -> None:
    results = torch_fleet.run("started", WORLD, program="ddp")
    assert all(r["parameters"] == results[0]["parameters"] for r in results)
    require_shared_is_shared(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["model", "static_graph", True], "use static_graph=False"),
        (["model", "mixed_precision", True], "use torch.autocast"),
    ],
)
def test_ddp_options_that_are_not_supported(torch_fleet: Template, change: list[Any], message: str) -> None:
    assert message in torch_fleet.run("refused", 1, program="ddp", change=change)[0]
