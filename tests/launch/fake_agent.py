"""Stands in for an agent: does what the file ``<node>.script`` in the log directory says.

``follow``: leaves when the coordinator has stopped · ``exit N``: leaves at once · ``stubborn``: ignores SIGTERM, and so
does its worker · ``serve``: until SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

config = json.loads(sys.stdin.readline())
folder = Path(config["log_dir"])
script = folder / f"{config['node']}.script"
word, _, argument = (script.read_text() if script.exists() else "follow").partition(" ")
about = {"config": config, "environment": sorted(os.environ), "pid": os.getpid(), "pgid": os.getpgrp()}
if word == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    about["worker"] = subprocess.Popen(["sleep", "600"]).pid
(folder / f".{config['node']}.json").write_text(json.dumps(about))
(folder / f".{config['node']}.json").rename(folder / f"{config['node']}.json")
if word == "exit":
    sys.exit(int(argument))
while word != "follow" or not (folder / "stopped").exists():
    time.sleep(0.01)
