"""Facts about the machine, from files and commands that are made up here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotswap.node import machine
from hotswap.node.machine import Machine, address_of


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FILE_SYSTEMS", ())
    monkeypatch.setattr(machine.gpus, "visible", lambda *_: ())


def port(root: Path, name: str, *, state: str = "4: ACTIVE", downed: int = 0, errors: int = 0) -> None:
    folder = root / name / "ports" / "1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "counters" / "link_downed").write_text(f"{downed}\n")
    (folder / "counters" / "symbol_error").write_text(f"{errors}\n")


def test_only_ports_that_changed_are_told_and_only_once(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", downed=7)
    port(tmp_path, "mlx5_1")
    (tmp_path / "mlx5_2" / "ports" / "1").mkdir(parents=True)  # without counters, as some drivers have it
    here = Machine("a", tmp_path)
    assert here.facts() == []
    port(tmp_path, "mlx5_0", state="1: DOWN", downed=8)
    (found,) = here.facts()
    assert found.facts == {"port": "mlx5_0/1", "state": "DOWN", "link_downed_delta": 1, "symbol_error_delta": 0}
    assert here.facts() == []


def test_gpus_are_asked_and_named_as_the_kernel_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "00000000:3D:00.0, 2, No, Yes, Not Active\n00000000:40:00.0, [N/A], 1, 0, Active\nError\n"
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=rows)

    monkeypatch.setattr(machine.gpus, "visible", lambda *_: ("0", "1"))
    monkeypatch.setattr(machine.subprocess, "run", run)
    first, second = Machine("a", tmp_path).facts()
    assert (first.gpu, first.fact("ecc_uncorrected"), first.fact("row_remap_failure")) == ("0000:3d:00", 2, True)
    assert (first.fact("row_remap_pending"), first.fact("hw_slowdown")) == (False, False)
    assert (second.gpu, second.fact("ecc_uncorrected"), second.fact("row_remap_pending")) == ("0000:40:00", 0, True)
    assert second.fact("hw_slowdown") is True
    assert "pci.bus_id" in asked[0][1]


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10), subprocess.CalledProcessError(9, "x")]
)
def test_a_driver_that_does_not_answer_is_no_evidence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(machine.gpus, "visible", lambda *_: ("0",))
    monkeypatch.setattr(machine.subprocess, "run", run)
    assert Machine("a", tmp_path).facts() == []


def test_full_file_systems_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = {"/full": 4, "/room": 6}
    monkeypatch.setattr(machine, "FILE_SYSTEMS", ("/full", "/room", str(tmp_path / "missing")))
    real = os.statvfs

    def statvfs(path: str) -> Any:
        return SimpleNamespace(f_blocks=100, f_bavail=free[path]) if path in free else real(path)

    monkeypatch.setattr(machine.os, "statvfs", statvfs)
    (found,) = Machine("a", tmp_path).facts()
    assert (found.facts["path"], found.facts["used_percent"]) == ("/full", 96.0)


def test_addresses() -> None:
    assert address_of("00000000:3D:00.0") == "0000:3d:00"
    assert address_of("0001:0A:00.0") == "0001:0a:00"
