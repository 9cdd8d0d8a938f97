"""Probes that misbehave, for the tests of the runner."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hotswap.diagnosis.probes import Outcome, Status


def passes() -> Outcome:
    print("some chatter")
    return Outcome(status=Status.PASSED, detail="fine", measured={"x_s": 1.5})


def raises() -> Outcome:
    raise OSError("the disk is on fire")


def hangs() -> Outcome:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, file=sys.stderr, flush=True)
    with open(os.environ["PROBE_PID_FILE"], "w", encoding="ascii") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return passes()


def crashes() -> Outcome:
    os.abort()


def confused() -> str:
    return "no outcome"
