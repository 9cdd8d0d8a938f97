"""What a swap costs by either adapter: ``python tests/comm/swap_cost.py`` (not a test; needs torch >= 2.14 for both).

Eight slots with some twenty groups each train until one is killed in the middle of a step; a spare takes its place. The
adapters take turns, so that whatever else the machine does hits both. Of each swap the slowest slot counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess
from comm_mix import make_mesh, step

from hotswap.comm.gloo import REBUILD, RECONFIGURE, SWAP
from hotswap.errors import Fenced, PeerUnreachable

WORLD, VICTIM, LAYOUTS, STEPS, RESTARTS, ELEMENTS = 8, 5, 5, 5, 3, 1000
PHASES = ("park_ms", "connect_ms", "first_use_ms", "swap_ms", "retire_ms", "reconnect_ms")
"""``swap_ms`` is connect and first use together; ``reconnect_ms`` is the median of a few swaps in which nobody died."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8, help="kills for each adapter")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, list[dict[str, float]]] = {REBUILD: [], RECONFIGURE: []}
    for number in range(arguments.runs):
        for swap in sorted(rows, reverse=bool(number % 2)):
            rows[swap].append(measure(swap))
    result = {"torch": torch.__version__, "runs": arguments.runs, "swaps": {k: summary(v) for k, v in rows.items()}}
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(swap: str) -> dict[str, float]:
    """One kill and, after it, a few swaps without one; the slowest slot of each phase."""
    os.environ[SWAP] = swap
    fleet = Fleet(WORLD, deadline_s=60.0)
    results = [row for row in fleet.run(one_slot, spare_for=frozenset({VICTIM})).values() if row != "killed"]
    assert {row["swap"] for row in results} == {swap}, "this torch cannot reconfigure"
    return {phase: max(row[phase] for row in results if phase in row) for phase in PHASES}


def one_slot(process: SlotProcess) -> Any:
    meshes = [make_mesh(process.slot) for _ in range(LAYOUTS)]
    adapter: Any = process.groups._adapter
    row: dict[str, Any] = {"swap": adapter.swap}
    if process.spare:
        process.values.get("fence/1", 20.0)
    else:
        process.groups.connect(1, process.values)
        row["park_ms"] = train_until_killed(process, meshes)
        process.groups.detach()
    process.barrier("detached")
    row["connect_ms"] = process.groups.connect(2, process.values).ms
    row["first_use_ms"] = timed(lambda: train(process, meshes, 1))
    row["swap_ms"] = row["connect_ms"] + row["first_use_ms"]
    row["retire_ms"] = timed(process.groups.retire().join)
    row["reconnect_ms"] = statistics.median(swap_again(process, meshes, 3 + k) for k in range(RESTARTS))
    process.barrier("end")
    return row


def train_until_killed(process: SlotProcess, meshes: list[Any]) -> float:
    process.barrier("connected")
    watch = process.watch(1, threading.Event())
    try:
        for number in range(1_000_000):
            if number == STEPS and process.slot == VICTIM:
                dist.all_reduce(torch.ones(ELEMENTS), group=meshes[0].tensor, async_op=True)
                process.die()
            train(process, meshes, 1)
    except (Fenced, PeerUnreachable, RuntimeError):
        pass
    return float(watch.park().ms)


def swap_again(process: SlotProcess, meshes: list[Any], generation: int) -> float:
    process.barrier(f"before/{generation}")
    process.groups.detach()
    ms = process.groups.connect(generation, process.values).ms
    train(process, meshes, 1)
    process.groups.retire().join()
    return ms


def train(process: SlotProcess, meshes: list[Any], steps: int) -> None:
    for _ in range(steps):
        for mesh in meshes:
            step(process, mesh, ELEMENTS)


def timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


def summary(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Least, median and most of each phase."""
    columns = {phase: [row[phase] for row in rows] for phase in PHASES}
    return {
        phase: [round(value, 1) for value in (min(column), statistics.median(column), max(column))]
        for phase, column in columns.items()
    }


if __name__ == "__main__":
    main()
