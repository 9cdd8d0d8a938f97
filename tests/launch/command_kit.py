"""A coordinator that commands find by a job's log directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hotswap.config import CoordinatorConfig

TOKEN = "0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def coordinator_of_job(directory: Path, *, nodes: int, allow_inject: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """Its process, which waits for *nodes*; *directory* has the files by which commands find it."""
    config = CoordinatorConfig(
        job_id="job", token=TOKEN, nodes_active=nodes, nodes_max=nodes, nproc_per_node=1,
        events_path=str(directory / "events.jsonl"), allow_inject=allow_inject,
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
        (directory / "token").write_text(TOKEN + "\n")
        about = {"host": "127.0.0.1", "port": json.loads(process.stdout.readline())["port"]}
        (directory / "job.json").write_text(json.dumps({**about, "token_file": str(directory / "token")}))
        yield process
