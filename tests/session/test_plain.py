"""The same script without 'hotswap run', as torchrun would start it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from session_kit import DEADLINE_S, SCRIPT


def run(directory: Path, how: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HOTSWAP_")}
    torchruns = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(directory / "log")],
        env={**mine, **torchruns},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    return done, [json.loads(line) for line in (directory / "log").read_text().splitlines()]


def test_it_trains_unprotected_and_says_so(tmp_path: Path) -> None:
    done, log = run(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    assert "unprotected" in done.stderr
    assert [line["step"] for line in log if line["what"] == "attempt"] == [0, 1, 2, 3]
    assert [line["step"] for line in log if line["what"] == "end"] == [4]


def test_errors_are_the_scripts(tmp_path: Path) -> None:
    done, log = run(tmp_path, "communication error")
    assert done.returncode == 1 and "Connection closed by peer" in done.stderr
    assert [line["step"] for line in log if line["what"] == "attempt"] == [0, 1]
