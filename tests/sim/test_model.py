"""The Promela model of the swap protocol: in step with the code, right, and wrong without any of the parts it is about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hotswap.core.transitions import Kind, Phase
from hotswap.sim.model_tables import main, render

MODELS = Path(__file__).parents[2] / "models"
needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="spin and gcc check the model; apt-get install spin gcc",
)


def test_the_table_is_the_codes_own() -> None:
    assert main(["--check", str(MODELS / "transitions.pml")]) == 0, (
        "run make docs and see whether the model still holds"
    )


def test_an_outdated_table_is_noticed_and_can_be_brought_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "transitions.pml"
    assert main(["--check", str(old)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([str(old)]) == main(["--check", str(old)]) == 0
    assert old.read_text() == render()


def test_the_table_is_whole() -> None:
    defined = dict(re.findall(r"#define (\w+) (\d+)", render()))
    assert len(defined) == len(Phase) + len(Kind) + 1
    assert defined["VERSIONS"] == "2"


def check(tmp_path: Path, *defines: str, live: bool = False) -> str:
    """What spin has found; empty if nothing."""
    flags = [f"-D{name}" for name in defines]
    compiled = ["-DNFAIR=3"] if live else ["-DSAFETY", "-DNOCLAIM"]
    commands = [
        ["spin", *flags, "-a", str(MODELS / "swap.pml")],
        ["gcc", "-O2", "-w", *compiled, "-o", "pan", "pan.c"],
        ["./pan", "-m1000000", *(["-a", "-f", "-N", "live"] if live else [])],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=110)
    assert "max search depth too small" not in done.stdout
    found = re.search(r"errors: (\d+)", done.stdout)
    assert found is not None, done.stdout
    return "" if found[1] == "0" else done.stdout


@needs_spin
def test_no_order_of_events_breaks_a_promise(tmp_path: Path) -> None:
    assert check(tmp_path, "LOSSES=2") == ""


@needs_spin
def test_training_always_comes_to_its_end(tmp_path: Path) -> None:
    assert check(tmp_path, "LOSSES=1", live=True) == ""


@needs_spin
@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("NO_GATE", "resume_step>=committed"),
        ("ONE_VERSION", "resume_step>=committed"),
        ("NO_FENCE_CHECK", "history"),
    ],
)
def test_without_one_of_its_parts_the_protocol_breaks(tmp_path: Path, part: str, broken: str) -> None:
    found = check(tmp_path, "LOSSES=1", part)
    assert "assertion violated" in found and broken in found
