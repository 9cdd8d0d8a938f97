"""A coordinator that commands find by a job's log directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hotswap.config import CoordinatorConfig
from hotswap.launch.command import FILE, describe, find

TOKEN = "0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def coordinator_of_job(
    directory: Path, *, nodes: int, allow_inject: bool = False, token: str = TOKEN
) -> Iterator[subprocess.Popen[bytes]]:
    """Its process, which waits for *nodes*; *directory* has the files by which commands find it."""
    config = CoordinatorConfig(
        job_id="job", token=token, nodes_active=nodes, nodes_max=nodes, nproc_per_node=1,
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
        (directory / "token").write_text(token + "\n")
        describe_job(directory, [json.loads(process.stdout.readline())["port"]])
        yield process


def describe_job(directory: Path, ports: Sequence[int], *, takeover_s: float = 0.5) -> None:
    """As its launcher would, for coordinators on this machine."""
    coordinators = [("127.0.0.1", port) for port in ports]
    described = describe(coordinators, takeover_s=takeover_s, token_file=str(directory / "token"))
    (directory / FILE).write_text(json.dumps(described))


def port_of(directory: Path) -> int:
    """Of the first coordinator."""
    return find(directory).coordinators[0][1]
