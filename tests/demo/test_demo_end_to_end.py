"""The whole demonstration with real processes. The matrix of what is killed when is in tests/e2e."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotswap.demo.records import read_final, read_records
from hotswap.demo.runner import Tail

pytestmark = pytest.mark.e2e
SCRIPTS = Path(__file__).parents[2] / "src" / "hotswap" / "demo"
DEMO = [sys.executable, "-m", "hotswap.cli", "demo", "--framework", "ddp"]


@contextmanager
def demo(tmp_path: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A demonstration whose temporary files are below *tmp_path*, ended at the end."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*DEMO, *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job, which this test may be part of, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (pytest has one thread)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def left_over(tmp_path: Path) -> list[str]:
    """Command lines of processes that know the temporary directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={tmp_path}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def wait_until_nothing_is_left(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while left := left_over(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_one_json_object_says_that_it_recovered_and_is_identical(tmp_path: Path) -> None:
    with demo(tmp_path, "--kill", "node", "--at", "reduce", "--steps", "24", "--json") as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["recovered"] is found["identical"] is found["samples_exactly_once"] is True
    assert found["final_state_sha256"] == found["reference_sha256"]
    assert (found["generation"], found["redone_steps"], len(found["losses"])) == (2, 1, 24)
    assert found["losses"][-1] < found["losses"][0]
    assert set(found["phases_ms"]) == {"detect", "fence", "plan", "rebuild", "restore", "redo", "total"}
    wait_until_nothing_is_left(tmp_path)
    assert list(tmp_path.glob("hotswap*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    keep = tmp_path / "kept"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with demo(temporary, "--kill", "none", "--steps", "2000", "--keep", str(keep)) as process:
        deadline = time.monotonic() + 60
        while not any(Tail(path).lines() for path in keep.glob("reference-*/records/slot0.jsonl")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err
    wait_until_nothing_is_left(temporary)
    assert list(temporary.glob("hotswap*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "layout", "slots"),
    [("train_ddp.py", "dp2", 2), ("train_fsdp2.py", "dp2", 2), ("train_megatron.py", "tp2", 2)],
)
def test_the_programs_run_unprotected_under_torchrun(tmp_path: Path, script: str, layout: str, slots: int) -> None:
    arguments = ["--layout", layout, "--steps", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={slots}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    done = subprocess.run(
        [*command, str(SCRIPTS / script), *arguments],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "unprotected" in done.stderr
    records = read_records(tmp_path)
    assert sorted((record.slot, record.step) for record in records) == [
        (slot, step) for slot in range(slots) for step in range(2)
    ]
    assert len(read_final(tmp_path)) == slots
