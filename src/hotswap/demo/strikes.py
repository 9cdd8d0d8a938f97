"""Faults from outside, on a job of this process: its log directory says which processes it has.

For jobs that are run to be struck; others are asked (``hotswap inject``), and have to allow it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from hotswap.core.drills import DRILLS, Victim
from hotswap.core.types import host_of
from hotswap.errors import UsageError


def strike(logs: Path, kind: str, *, slot: int = -1, node: str = "") -> list[int]:
    """Do it; the process ids that were meant. UsageError if there is no such process on this machine.

    *logs* is the job's directory, in which its launcher keeps ``pids.json``; a worker is named by its *slot*, all else by *node*.
    """
    chosen = DRILLS[kind]
    try:
        pids = json.loads((logs / "pids.json").read_text())
    except (OSError, ValueError):
        raise UsageError(
            f"{logs} is not the log directory of a job that runs on this machine: it has no pids.json"
        ) from None
    if chosen.victim is Victim.COORDINATOR:
        return _signal([pids["coordinator"]], chosen.number)
    if chosen.victim is Victim.WORKER:
        return _signal(_workers(logs, pids["agents"].values(), slot), chosen.number)
    if node not in pids["agents"]:
        raise UsageError(f"no node {node!r} here; there are {', '.join(sorted(pids['agents']))}")
    agent = pids["agents"][node]
    if chosen.victim is Victim.AGENT:
        return _signal([agent], chosen.number)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent, chosen.number)
    return [agent]


def kernel_log(logs: Path, node: str) -> Path:
    """Where the node of a job that was started with ``--kernel-log`` accordingly finds its kernel's messages."""
    return logs.parent / f"kernel-{node}.log"


def lose_gpu(logs: Path, node: str) -> None:
    """Say in the node's kernel log what the driver says when a GPU no longer answers."""
    booted_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    with kernel_log(logs, node).open("a") as file:
        file.write(f"3,1,{booted_us},-;NVRM: Xid (PCI:0000:3d:00): 79, pid='<unknown>', GPU has fallen off the bus.\n")


def _workers(logs: Path, groups: object, slot: int) -> list[int]:
    """The live process that writes the slot's log, of the newest generation that has one here: spares keep workers of their own."""
    ours = set(groups)  # type: ignore[call-overload]
    members = _places(logs)
    found: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            output = Path(os.readlink(entry / "fd" / "1"))
            trains = not members or output.parent.parent.name in members
            if output.name == f"slot{slot}.out" and trains and os.getpgid(int(entry.name)) in ours:
                found.append((int(output.parent.name.removeprefix("gen")), int(entry.name)))
    if not found:
        raise UsageError(f"slot {slot} has no process on this machine")
    return [max(found)[1]]


def _places(logs: Path) -> set[str]:
    """Names of the nodes that train, as the event log has them."""
    places: list[str] = []
    for line in (logs / "events.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            places = event.get("places", places) if event["event"] == "recovery_started" else places
    return {host_of(node) for node in places}


def _signal(pids: list[int], number: signal.Signals) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids
