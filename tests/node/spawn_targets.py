"""What the started processes of test_spawn run."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def nothing() -> None:
    pass


def leave(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def fail() -> None:
    raise ValueError("on purpose")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def farewell(path: str) -> None:
    """Exit handlers run after non-daemon threads; what was printed without a line's end is written."""
    atexit.register(lambda: Path(path).write_text("goodbye"))
    sys.stdout.write("no line end")
    threading.Timer(0.05, print, [" from a thread"], {"end": " without one either"}).start()


def describe() -> None:
    """Everything about this process that is its own."""
    groups = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "pgid": os.getpgrp(),
                "sid": os.getsid(0),
                "cwd": os.getcwd(),
                "environ": dict(os.environ),
                "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
                "blocked": len(groups),
                "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
                "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                "stdin": sys.stdin.read(),
                "modules": [name for name in ("torch", "xml.dom.minidom") if name in sys.modules],
            }
        )
    )


def say(name: str) -> None:
    """Write to the descriptor whose number is in the environment; children must not inherit it."""
    fd = int(os.environ[name])
    os.write(fd, b"hello")
    assert not os.get_inheritable(fd)


def sleep() -> None:
    print(os.getpid(), flush=True)
    time.sleep(600)


def family() -> None:
    """A child, a grandchild in a session of its own, and a daemon whose parent has left; all of them outlive this."""
    program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", program])
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{program}' & exit 0"], check=True)
    print("ready\n", end="", flush=True)  # in one piece, for the others write there too
    time.sleep(600)


def draw() -> None:
    """Random numbers of the libraries' global generators, and torch's number of threads."""
    import numpy
    import torch

    print(json.dumps([int(numpy.random.randint(2**31)), torch.get_num_threads()]))


def count_gpus() -> None:
    import spawn_gpu_user
    import torch

    found = {"on import": spawn_gpu_user.FOUND, "in the worker": torch.cuda.device_count()}
    print(json.dumps({**found, "threads": len(os.listdir("/proc/self/task"))}))
