from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hotswap.node.stopped import StoppedWorkers


def state(proc: Path, pid: int, letter: str) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (py (T) x) {letter} 1 2 3")


def test_only_those_that_stay_stopped_are_overdue(tmp_path: Path) -> None:
    watch = StoppedWorkers(5.0, tmp_path)
    for pid, letter in ((1, "T"), (2, "S"), (3, "T"), (4, "t")):
        state(tmp_path, pid, letter)
    assert watch.overdue([1, 2, 3, 4, 99], 10.0) == []
    state(tmp_path, 3, "R")
    assert watch.overdue([1, 2, 3, 4], 14.0) == []
    state(tmp_path, 3, "T")
    assert watch.overdue([1, 2, 3, 4], 15.5) == [1]
    assert watch.overdue([3], 21.0) == [3]


def test_a_real_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = StoppedWorkers(0.0)
        assert watch.overdue([process.pid], 1.0) == []
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 5.0
        while not watch.overdue([process.pid], time.monotonic()):
            assert time.monotonic() < end
            time.sleep(0.005)
        process.kill()
