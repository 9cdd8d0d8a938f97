"""``hotswap drain`` against a coordinator that is one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from hotswap.cli import main
from hotswap.config import CoordinatorConfig

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """The log directory of a job that waits for its nodes."""
    config = CoordinatorConfig(
        job_id="job", token=TOKEN, nodes_active=1, nodes_max=1, nproc_per_node=1, events_path=str(tmp_path / "events.jsonl")
    )  # fmt: skip
    command = [sys.executable, "-m", "hotswap.node.coordinator"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        stack.callback(process.kill)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        (tmp_path / "token").write_text(TOKEN + "\n")
        about = {"host": "127.0.0.1", "port": json.loads(process.stdout.readline())["port"]}
        (tmp_path / "job.json").write_text(json.dumps({**about, "token_file": str(tmp_path / "token")}))
        yield tmp_path


def test_a_node_that_is_not_there(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", str(logs), "node7"]) == 2
    assert "there is no node 'node7' in this job; there are none" in capsys.readouterr().err


def test_another_jobs_token(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "token").write_text("f" * 32)
    assert main(["drain", str(logs), "node7"]) == 1
    assert "token" in capsys.readouterr().err
    # The coordinator has counted it, and serves on.
    (logs / "token").write_text(TOKEN)
    assert main(["drain", str(logs), "node7"]) == 2
    refused = [line for line in (logs / "events.jsonl").read_text().splitlines() if "connection_refused" in line]
    assert len(refused) == 1


def test_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", str(tmp_path), "node7"]) == 2
    assert "is not the log directory of a running job" in capsys.readouterr().err
