from __future__ import annotations

import json
import resource
import socket

import pytest

from hotswap.cli import main
from hotswap.launch import doctor


def test_this_machine_is_examined_and_the_deadlines_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--detection-budget-s", "4"]) == 0
    shown = capsys.readouterr().out
    assert "       4 s  detection budget" in shown and "     0.8 s  heartbeat" in shown
    assert main(["doctor", "--json", "--hang-budget-s", "12", "--pause-limit-s", "90"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {check["status"] for check in found["checks"]} <= {"ok", "note"}
    assert [rung["rung"] for rung in found["ladder"]][:3] == ["in place", "respawn", "spare"]
    assert (found["deadlines"]["hang"]["seconds"], found["deadlines"]["pause"]["seconds"]) == (12, 90)


@pytest.mark.parametrize("flags", [["--hang-budget-s", "soon"], ["--collective-timeout-s", "3"]])
def test_deadlines_that_cannot_work_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    def unreachable(*_: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(doctor.metadata, "version", nothing)
    monkeypatch.setattr(socket, "create_server", unreachable)
    monkeypatch.setattr(socket, "gethostbyname", unreachable)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(doctor, "LOOKUP_S_MAX", -1.0)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    for said in ("torch is not installed", "no route", "ulimit -n 1024", "ulimit -l unlimited", "/etc/hosts"):
        assert said in shown
    monkeypatch.setattr(doctor.metadata, "version", lambda _: "2.9.1+cu126")
    main(["doctor", "--json"])
    assert "2.9.1+cu126; at least 2.11" in capsys.readouterr().out


def test_the_ladder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ladder"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("in place") and shown[-1].endswith("then exit 93)")
    assert main(["doctor", "--ladder", "--json", "--detection-budget-s", "10", "--hang-budget-s", "off"]) == 0
    assert {rung["rung"]: rung for rung in json.loads(capsys.readouterr().out)}["rescue"]["bound"] == "60 s per wait"
