"""Stands in for the coordinator: does what the file ``coordinator.script`` beside its event log says, one line per start.

``exit N``: end the job with N · ``crash N``: leave without a word · ``silent``: never listen · ``refuse TEXT``: say an
error · ``warn TEXT``: say it, then end the job
with 0 · ``serve``: until SIGTERM or SIGINT, which it answers as the real one does · ``until-alone``: until all agents have gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

config = json.loads(sys.stdin.readline())
folder = Path(config["events_path"]).parent
script = folder / "coordinator.script"
first, _, rest = script.read_text().partition("\n")
script.write_text(rest or first)
with (folder / "coordinator.starts").open("a") as log:
    log.write(json.dumps({"port": config["port"], "environment": sorted(os.environ), "pgid": os.getpgrp()}) + "\n")
word, _, argument = first.partition(" ")
if word == "refuse":
    print(argument, file=sys.stderr)
    sys.exit(75)
if word == "silent":
    sys.exit(0)
listener = socket.create_server((config["host"], config["port"]))


def stop(number: int, _: object) -> None:
    print(json.dumps({"exit_code": 128 + number}), flush=True)
    (folder / "stopped").touch()
    os._exit(128 + number)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
if word == "serve":
    time.sleep(600)
if word == "warn":
    print(json.dumps({"warning": argument}), flush=True)
    argument = "0"
if word == "crash":
    os.kill(os.getpid(), int(argument))
print(json.dumps({"exit_code": int(argument)}), flush=True)
(folder / "stopped").touch()
sys.exit(int(argument))
