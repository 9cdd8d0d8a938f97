"""Runs scenarios in a fleet of forked ranks, connected by stable groups over gloo.

A template process of its own imports torch (and Megatron-Core on CPU) once, without threads, and forks every fleet from
itself: a fleet of eight starts in milliseconds, and nothing that Megatron's CPU support changes reaches the tests.
Requests and answers are JSON lines. Nothing outlives `Template.close`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEADLINE_S = 60.0


class Template:
    """Started on first use; ``prelude`` is "torch" or "megatron"."""

    def __init__(self, prelude: str, python: str = sys.executable) -> None:
        paths = [str(HERE.parents[1] / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        self._process = subprocess.Popen(
            [python, str(HERE / "state_fleet.py"), prelude],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def run(self, scenario: str, world: int, **arguments: Any) -> list[Any]:
        """Results of all ranks; AssertionError with the tracebacks if one failed or the fleet hung."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([scenario, world, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the template process ended with {self._process.wait()}"
        answer = json.loads(line)
        assert not answer["errors"], "\n".join(answer["errors"])
        results: list[Any] = answer["results"]
        return results

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.stdout.close()
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class FileRendezvous:
    """Key-value space in a folder."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def set(self, key: str, value: bytes) -> None:
        path = self.directory / key.replace("/", "%")
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(value)
        temporary.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path, end = self.directory / key.replace("/", "%"), time.monotonic() + timeout_s
        while not path.exists():
            assert time.monotonic() < end, f"nobody set {key}"
            time.sleep(0.001)
        return path.read_bytes()


def _serve(prelude: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print must not mix with answers
    import torch
    import torch._dynamo  # which each rank would import at its first optimizer

    torch.set_num_threads(1)
    if prelude == "megatron":
        importlib.import_module("state_megatron")
    importlib.import_module("state_scenarios")
    for line in sys.stdin:
        scenario, world, arguments = json.loads(line)
        print(json.dumps(_run_fleet(scenario, world, arguments)), file=answers, flush=True)
    os._exit(0)  # nothing to tear down, and torch takes seconds for it


def _run_fleet(scenario: str, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        ranks = {_fork(scenario, rank, world, directory, arguments): rank for rank in range(world)}
        hung = _reap(ranks)
        results: list[Any] = [None] * world
        errors = [f"rank {rank} hung and was killed" for rank in hung]
        for rank in range(world):
            path = Path(directory) / f"result-{rank}"
            answer = json.loads(path.read_text()) if path.exists() else {"error": f"rank {rank} died"}
            results[rank] = answer.get("result")
            errors += [answer["error"]] if "error" in answer and rank not in hung else []
        return {"results": results, "errors": errors}


def _reap(ranks: dict[int, int]) -> list[int]:
    left, end = dict(ranks), time.monotonic() + DEADLINE_S
    while left and time.monotonic() < end:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        left.pop(pid, None) if pid else time.sleep(0.002)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(left.values())


def _fork(scenario: str, rank: int, world: int, directory: str, arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        import faulthandler

        faulthandler.dump_traceback_later(DEADLINE_S - 5, exit=False)
        function = getattr(importlib.import_module("state_scenarios"), scenario)
        answer = {"result": function(rank, world, FileRendezvous(directory), **arguments)}
    except BaseException:
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    (Path(directory) / f"result-{rank}").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
