"""Probes run in processes of their own, end at their deadline, and say what they found."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotswap import cli
from hotswap.diagnosis import Verdict, diagnose
from hotswap.diagnosis.probes import Status, as_evidence, available, gpu, host, run_probes, runner, smi
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
    assert [one.status for one in run_probes(["gpu_health", "gpu_compute"], deadline_s=60)] == [Status.SKIPPED] * 2


ROWS = {
    "index,uuid,memory.used,utilization.gpu": "0, GPU-a, 12, 0\n1, GPU-b, 70000, 0\n2, GPU-c, 3, 97\n3, GPU-d, [N/A], 0\n",
    "gpu_uuid,pid": "GPU-d, 4711\n",
}


@pytest.fixture
def smi_answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What nvidia-smi says to a query; without an answer it fails, as it does for fields that it does not know."""
    answers = dict(ROWS)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        fields = command[1].partition("=")[2]
        if fields not in answers:
            raise subprocess.CalledProcessError(2, command)
        return subprocess.CompletedProcess(command, 0, stdout=answers[fields])

    monkeypatch.setattr(smi.subprocess, "run", run)
    return answers


def test_a_gpu_is_idle_only_if_nobody_computes_or_holds_memory_on_it(smi_answers: dict[str, str]) -> None:
    found = smi.gpus()
    assert found is not None
    assert [(gpu.uuid, gpu.idle) for gpu in found] == [
        ("GPU-a", True),
        ("GPU-b", False),
        ("GPU-c", False),
        ("GPU-d", False),
    ]
    assert [gpu.index for gpu in smi.visible(found, {"CUDA_VISIBLE_DEVICES": "2,GPU-b"})] == [1, 2]
    assert smi.visible(found, {}) == smi.visible(found, {"CUDA_VISIBLE_DEVICES": "MIG-x"}) == found
    smi_answers.clear()
    assert smi.gpus() is None


def test_probes_do_not_even_see_a_gpu_that_is_used(
    smi_answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.os, "environ", environment := {})
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True, device_count=lambda: 1), version=SimpleNamespace(cuda="13")
    )
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: torch)
    outcome = gpu.gpu_collective()
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-a"}
    assert outcome.status is Status.SKIPPED
    assert "left alone, for they are used: GPU 1 (70000 MiB), GPU 2 (3 MiB), GPU 3 (pid 4711)" in outcome.detail
    smi_answers["index,uuid,memory.used,utilization.gpu"] = "0, GPU-a, 9000, 0\n"
    assert gpu.gpu_compute().detail == "somebody uses the GPUs: GPU 0 (9000 MiB)"
    smi_answers["index,uuid,memory.used,utilization.gpu"] = "0, GPU-a, 0, 0\n"
    torch.cuda.is_available = lambda: False
    assert gpu.gpu_memory().status is Status.FAILED, "the driver lists a GPU that CUDA cannot use"
    torch.version.cuda = None
    assert gpu.gpu_memory().status is Status.SKIPPED, "torch was built without CUDA"


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        ([["GPU-a", "0", "0", "0"], ["GPU-b", "[N/A]", "No", "No"]], Status.PASSED, "none of 2"),
        ([["GPU-a", "0", "0", "1"]], Status.PASSED, "none of 1"),
        ([["GPU-a", "3", "0", "0"]], Status.FAILED, "GPU-a: 3 uncorrectable"),
        ([["GPU-a", "0", "Yes", "0"]], Status.FAILED, "could not be remapped"),
    ],
)
def test_what_the_driver_has_counted(rows: list[list[str]], status: Status, said: str) -> None:
    outcome = gpu.read_health(rows)
    assert outcome.status is status and said in outcome.detail


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([["Completed", "Success"]] * 8, Status.PASSED),
        ([["Completed", "Success"], ["In Progress", "N/A"]], Status.FAILED),
        ([["Completed", "System not ready"]], Status.FAILED),
        ([["[N/A]", "[N/A]"]], Status.SKIPPED),
        ([], Status.SKIPPED),
    ],
)
def test_fabric(rows: list[list[str]], status: Status) -> None:
    assert host.read_fabric(rows).status is status


def test_memory_that_the_kernel_calls_damaged(tmp_path: Path) -> None:
    for controller, count in (("mc0", "0"), ("mc1", "2")):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "ue_count").write_text(f"{count}\n")
    assert host.check_memory_errors(0, tmp_path / "none").status is Status.PASSED
    assert host.check_memory_errors(4096, tmp_path / "none").status is Status.FAILED
    outcome = host.check_memory_errors(0, tmp_path)
    assert outcome.status is Status.FAILED and "2 errors" in outcome.detail


@pytest.mark.parametrize(
    ("status", "error_us", "outcome"),
    [
        (0x0001, 250, Status.PASSED),
        (0x0001, 3_000_000, Status.FAILED),
        (host.STA_UNSYNC, 16_000_000, Status.SKIPPED),
    ],
)
def test_the_kernels_own_clock(status: int, error_us: int, outcome: Status) -> None:
    assert host.read_timex(status, error_us).status is outcome
    assert host.kernel_clock().status in Status


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
