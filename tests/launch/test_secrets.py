"""What others on the machine can see of a job: neither its token, nor what it writes."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_kit import until

SCRIPT = str(Path(__file__).parent / "train_tiny.py")
STEPS = 12


def processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def written(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["environment", "file"])
def test_the_token_is_on_no_command_line_in_no_log_and_in_no_worker(how: str, tmp_path: Path) -> None:
    token, logs, go = secrets.token_hex(32), tmp_path / "logs", tmp_path / "go"
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    own = ["--token-file", str(token_file)] if how == "file" else []
    environment = {**os.environ, **({"HOTSWAP_TOKEN": token} if how == "environment" else {})}
    flags = ["--standalone", "--nnodes", "2", "--nproc-per-node", "1", "--log-dir", str(logs), *own]
    with (tmp_path / "console").open("wb") as console:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "hotswap.cli", "run", *flags, SCRIPT, str(STEPS), str(go)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            umask=0,
        )
        try:
            trains = lambda: any(b'"step": 10' in read(path) for path in logs.rglob("events.jsonl"))  # noqa: E731
            until(lambda: launcher.poll() is not None or trains(), deadline_s=90)
            assert launcher.poll() is None, (tmp_path / "console").read_text()
            secret = token.encode()
            assert not [path for path in processes() if secret in read(path / "cmdline")]
            # The launcher has it from its user; nobody else needs it there.
            have_it = [int(path.name) for path in processes() if secret in read(path / "environ")]
            assert set(have_it) <= {launcher.pid}
            found = [path for path in written(logs) if path.name != "token"]
            assert len(found) > 5
            assert [path for path in found if secret in read(path)] == []
            # Whatever the umask is.
            open_to_others = [path for path in logs.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
            assert open_to_others == []
            go.touch()
            assert launcher.wait(60) == 0, (tmp_path / "console").read_text()
        finally:
            launcher.kill()
            launcher.wait()
    assert secret not in read(tmp_path / "console")
    assert [path for path in written(logs) if secret in read(path)] == []
