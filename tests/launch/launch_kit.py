"""A launcher in a process of its own, with programs that stand in for the coordinator and the agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where the stand-ins are found, before whatever is on the path already."""
DEADLINE_S = 20.0
PROGRAM = """
import json, sys
import msgspec
from hotswap import cli
from hotswap.launch import job, processes
from hotswap.launch.options import Options
# Longer than a test waits: who is not ended by a signal fails it.
processes.END_S = 60.0
job.COORDINATOR, job.AGENT = "fake_coordinator", "fake_agent"
# Without the parser, whose import of torch takes longer than all the rest.
cli.COMMANDS["run"] = lambda argv: job.run(msgspec.convert(json.loads(argv[0]), Options))
sys.exit(cli.main(["run", sys.argv[1]]))
"""


def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "deadline"
        time.sleep(0.005)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Launched:
    """``scripts``: what each fake does, by name (``coordinator``, ``node0``, ...). *options* are fields of Options."""

    def __init__(
        self,
        directory: Path,
        scripts: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder = directory / "logs" / "job"
        self.temporary = directory / "tmp"
        for folder in (self.folder, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in scripts.items():
            (self.folder / f"{name}.script").write_text(text)
        common = {"nodes_active": 1, "nodes_max": 1, "nproc_per_node": 1, "standalone": True, "job_id": "job"}
        files = {"log_dir": str(directory / "logs"), "preload": None, "entry": ["train.py", "--epochs", "3"]}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({**common, **files, **options})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": HERE, "TMPDIR": str(self.temporary), **(environment or {})},
            start_new_session=True,
        )

    def agent(self, name: str) -> dict[str, Any]:
        """What an agent says about itself, once it runs."""
        path = self.folder / f"{name}.json"
        until(lambda: path.exists() or self.process.poll() is not None)
        return dict(json.loads(path.read_text()))

    def coordinators(self) -> list[dict[str, Any]]:
        """What each start of the coordinator has said about itself."""
        path = self.folder / "coordinator.starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; nothing may be left of the job but its logs."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert list(self.temporary.iterdir()) == []
        for path in self.folder.glob("*.json"):
            about = json.loads(path.read_text())
            for key in ("pid", "worker"):
                assert key not in about or not alive(about[key]), f"{path.name}: {key}"
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
