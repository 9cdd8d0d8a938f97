"""The command line starts at once, and its exit codes are those of hotswap.errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hotswap
from hotswap import cli, errors


@pytest.mark.parametrize(
    "module",
    [
        "hotswap.cli",
        "hotswap.node.agent",
        "hotswap.node.coordinator",
        "hotswap.node.forkserver",
        "hotswap.launch.job",
        "hotswap.launch.inject",
    ],
)
def test_torch_is_imported_only_by_those_who_need_it(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotswap {hotswap.__version__}\n"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name}" in shown
    assert cli.main([]) == errors.EXIT_USAGE
    assert cli.main(["fly"]) == errors.EXIT_USAGE
    assert "there is no command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("wrong"), 2),
        (errors.RecoveryImpossible("gone"), 75),
        (errors.HotswapError("broken"), 1),
        (errors.PeerUnreachable("away"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "run", fail)
    assert cli.main(["run"]) == code
    assert capsys.readouterr().err == (f"hotswap: {error}\n" if str(error) else "")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "hotswap.demo.cli", None)
    monkeypatch.delitem(sys.modules, "rich", raising=False)
    assert cli.main(["demo"]) == errors.EXIT_USAGE
    assert "pip install 'hotswap[demo,megatron]'" in capsys.readouterr().err
