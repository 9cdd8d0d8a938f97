"""``hotswap chaos`` as users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "hotswap.cli"]


@pytest.mark.e2e
def test_a_part_of_the_matrix(tmp_path: Path) -> None:
    page = tmp_path / "table.html"
    arguments = ["--suite", "full", "--layouts", "ddp-dp3", "--faults", "node-backward", "no-spare", "segv-worker"]
    done = subprocess.run(
        [*COMMAND, "chaos", "run", *arguments, "--json", "--html", str(page)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert [(cell["drill"], cell["outcome"]) for cell in result["cells"]] == [
        ("node-backward", "identical"),
        ("no-spare", "stopped"),
        ("segv-worker", "identical"),
    ]
    assert result["bad"] == 0
    assert "node-backward" in page.read_text()


def test_the_list() -> None:
    done = subprocess.run([*COMMAND, "chaos", "list"], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "owner-and-holder" in done.stdout and "megatron-tp2-pp2-dp2" in done.stdout


def test_wrong_options_end_with_2() -> None:
    arguments = ["chaos", "run", "--faults", "meteor"]
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
