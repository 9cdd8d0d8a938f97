from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hotswap.errors import UsageError
from hotswap.session import faults
from hotswap.session.faults import Context, Fault, fault_point, parse

WORKER = """
import os, subprocess, sys
from hotswap.session import faults
sibling = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) if "--sibling" in sys.argv else None
print(sibling.pid if sibling else "", flush=True)
for generation, step, rehearsing in [(0, 3, True), (1, 2, False), (1, 3, False), (2, 3, False)]:
    faults.context.update(slot=5, step=step, generation=generation, rehearsing=rehearsing)
    for microbatch in range(4):
        faults.fault_point("forward")
        print(generation, step, microbatch, flush=True)
    faults.fault_point("optimizer")
"""


def run(tmp_path: Path, ordered: Any, *argv: str) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Exit status, printed lines and fault log of a worker that takes the steps of WORKER in a process group of its own."""
    log = tmp_path / "faults.jsonl"
    environment = {**os.environ, faults.FAULTS: json.dumps(ordered), faults.FAULT_LOG: str(log)}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, *argv],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, _ = process.communicate(timeout=30)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return process.returncode, out.splitlines(), lines


def fault(**fields: Any) -> dict[str, Any]:
    return {"step": 3, "moment": "forward", "slot": 5, **fields}


def test_nothing_ordered_nothing_dies(tmp_path: Path) -> None:
    status, lines, log = run(tmp_path, [])
    assert (status, len(lines), log) == (0, 17, [])


def test_it_strikes_at_its_step_moment_and_generation_and_not_in_a_rehearsal(tmp_path: Path) -> None:
    before = time.time()
    status, lines, log = run(tmp_path, [fault(occurrence=2)])
    assert status == -signal.SIGKILL
    assert lines[-1] == "1 3 1"
    [line] = log
    assert (line["kind"], line["slot"], line["moment"], line["step"]) == ("worker", 5, "forward", 3)
    assert before <= line["time"] <= time.time()


def test_another_generation_is_another_fault(tmp_path: Path) -> None:
    status, lines, _ = run(tmp_path, [fault(moment="optimizer", generation=2)])
    assert status == -signal.SIGKILL
    assert lines[-1] == "2 3 3"


@pytest.mark.parametrize(
    "other", [{"slot": 4}, {"step": 9}, {"moment": "backward"}, {"occurrence": 4}, {"generation": 3}]
)
def test_it_spares_everybody_else(tmp_path: Path, other: dict[str, Any]) -> None:
    status, lines, log = run(tmp_path, [fault(**other)])
    assert (status, len(lines), log) == (0, 17, [])


@pytest.mark.parametrize(("scope", "survives"), [("worker", True), ("node", False)])
def test_a_node_dies_as_a_process_group(tmp_path: Path, scope: str, survives: bool) -> None:
    status, lines, log = run(tmp_path, [fault(scope=scope)], "--sibling")
    assert status == -signal.SIGKILL
    assert log[0]["kind"] == scope
    sibling = int(lines[0])
    assert _runs(sibling) is survives
    if survives:
        os.kill(sibling, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether a process, that nobody here may wait for, still runs a moment after its group was killed."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        '[{"step": 1}]',
        '[{"step": 1, "slot": 0, "moment": "lunch"}]',
        '[{"step": 1, "slot": 0, "moment": "forward", "scope": "rack"}]',
    ],
)
def test_orders_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=faults.FAULTS):
        parse(text)


def test_an_empty_order_is_no_order() -> None:
    assert parse("") == ()


def test_unarmed_it_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "context", Context(faults=()))
    start = time.process_time()
    for _ in range(100_000):
        fault_point("forward")
    assert time.process_time() - start < 0.5
    assert not faults.context.passed


def test_the_environment_is_read_when_first_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "context", Context())
    monkeypatch.setenv(faults.FAULTS, json.dumps([fault()]))
    assert faults.armed()
    assert faults.context.faults == (Fault(**fault()),)
