"""Probes run in processes of their own, end at their deadline, and say what they found."""

from __future__ import annotations

import io
import json
import os
import time
from collections import namedtuple
from pathlib import Path

import pytest

from hotswap import cli
from hotswap.diagnosis import Verdict, diagnose
from hotswap.diagnosis.probes import Status, as_evidence, available, host, run_probes, runner
from hotswap.errors import EXIT_USAGE, EXIT_USER_ERROR

HERE = Path(__file__).parent


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    names = {name: f"slow_probes:{name}" for name in ("passes", "raises", "hangs", "crashes", "confused")}
    monkeypatch.setattr(runner, "BUILTIN", names)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PROBE_PID_FILE", str(tmp_path / "pid"))
    return tmp_path / "pid"


def test_outcomes(strange: Path) -> None:
    passed, raised, crashed, confused = run_probes(["passes", "raises", "crashes", "confused"])
    assert (passed.status, passed.detail, passed.measured) == (Status.PASSED, "fine", {"x_s": 1.5})
    assert (raised.status, raised.detail) == (Status.FAILED, "OSError: the disk is on fire")
    assert crashed.status is Status.FAILED and "signal 6" in crashed.detail
    assert confused.status is Status.FAILED and "no Outcome" in confused.detail


def test_a_probe_that_hangs_is_killed_with_all_it_started(strange: Path) -> None:
    (hung,) = run_probes(["hangs"], deadline_s=3.0)
    assert hung.status is Status.HUNG and not hung.ok
    grandchild = int(strange.read_text(encoding="ascii"))
    deadline = time.monotonic() + 10
    while _lives(grandchild):
        assert time.monotonic() < deadline, "what the probe had started is still there"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_are_evidence(strange: Path) -> None:
    evidence = as_evidence(run_probes(["passes", "raises"]), node="node-4", now=5.0)
    found = diagnose(evidence)
    assert (found.verdict, found.culprit.node, found.confident) == (Verdict.NODE_FAULT, "node-4", True)
    assert found.rules[0] == "job.probe-failed"
    assert diagnose(evidence[:1]).verdict is Verdict.UNKNOWN


def test_a_site_adds_probes_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = namedtuple("point", "name value")
    monkeypatch.setattr(runner, "entry_points", lambda group: [point("nhc", "site:nhc"), point("disk", "site:disk")])
    assert available()["nhc"] == "site:nhc"
    assert available()["disk"] == "site:disk"
    assert available()["memory"] == "hotswap.diagnosis.probes.host:memory"


def test_probes_of_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--json", "memory", "disk"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert [(one["name"], one["status"]) for one in data["probes"]] == [("memory", "passed"), ("disk", "passed")]


def test_gpu_probes_never_fail_where_there_is_no_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert [one.status for one in run_probes(["gpu_compute"], deadline_s=60)] == [Status.SKIPPED]


@pytest.mark.gpu
def test_gpu_probes_pass_on_a_healthy_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for one in run_probes(["gpu_compute", "gpu_memory", "gpu_collective"], deadline_s=60):
        assert one.ok, one


def test_the_command(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "passes", "raises"]) == EXIT_USER_ERROR
    shown = capsys.readouterr().out
    assert "passed   passes" in shown and "failed   raises" in shown
    assert cli.main(["probe", "nonsense"]) == EXIT_USAGE
    assert "there is no probe 'nonsense'" in capsys.readouterr().err


def test_shared_memory_counts_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl-abc").touch()
    (tmp_path / "other").touch()
    outcome = host.check_shared_memory(tmp_path)
    assert (outcome.status, outcome.measured["leftovers"]) == (Status.PASSED, 1.0)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1 << 20))
    assert host.check_shared_memory(tmp_path).status is Status.FAILED
    assert host.check_shared_memory(tmp_path / "missing").status is Status.SKIPPED


def test_a_slow_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_directory(tmp_path).status is Status.PASSED
    monkeypatch.setattr(host, "DISK_S_MAX", 0.0)
    outcome = host.check_directory(tmp_path)
    assert outcome.status is Status.FAILED and "took" in outcome.detail
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_returns_other_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(io.BytesIO):
        def fileno(self) -> int:
            return 0

        def read(self, size: int | None = -1) -> bytes:
            return super().read(size)[:-1] + b"?"

    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: Lossy())
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)
    outcome = host.check_directory(tmp_path)
    assert outcome.status is Status.FAILED and "other bytes" in outcome.detail


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("System time     : 0.000012 seconds slow of NTP time\nLeap status     : Normal\n", Status.PASSED),
        ("System time     : 2.5 seconds fast of NTP time\nLeap status     : Normal\n", Status.FAILED),
        ("System time     : 0.0 seconds fast of NTP time\nLeap status     : Not synchronised\n", Status.FAILED),
        ("506 Cannot talk to daemon\n", Status.SKIPPED),
    ],
)
def test_clock(text: str, status: Status) -> None:
    assert host.read_chrony(text).status is status
