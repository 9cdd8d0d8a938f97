"""How long training stands still when nodes are drained, in steps of the same job.

    python benchmarks/drain.py [--framework fsdp2] [--drains 2] [--output drain.json]

One job whose nodes are told to leave one after the other, each while a spare is there for it; hotswap's defaults. Training stands still
from the last commit before the swap to the word to go on; the pause is the time to the first commit after it, less the median time between
commits of undisturbed steps of the same job. Both in units of that median. The result is compared with an undisturbed job, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.plan import FRAMEWORKS, Outside
from hotswap.demo.report import versions
from hotswap.demo.runner import JobSpec, run_job
from hotswap.demo.verdict import Evidence, first_difference, gather


def run(spec: JobSpec) -> Evidence:
    code = run_job(spec)
    if code != 0:
        raise SystemExit(f"a job ended with {code}; its logs are in {spec.directory}")
    return gather(spec.directory, spec.logs / "events.jsonl", spec.fault_log, spec.train, code)


def gaps_s(events: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Times between commits: of steps that follow each other in a generation, and over each swap."""
    commits = [event for event in events if event["event"] == "step_committed"]
    plain, swaps = [], []
    for before, earlier, later in zip(commits, commits[1:], commits[2:], strict=False):
        gap = (later["time"] - earlier["time"]) / (later["step"] - earlier["step"])
        if earlier["generation"] != later["generation"]:
            swaps.append(later["time"] - earlier["time"])
        elif before["generation"] == later["generation"]:
            plain.append(gap)
    return plain, swaps


def still_s(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """From the last commit to the word to go on, for each swap."""
    found, committed = [], 0.0
    for event in events:
        if event["event"] == "step_committed":
            committed = event["time"]
        elif event["event"] == "training_started" and committed:
            found.append(event["time"] - committed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="fsdp2")
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--drains", type=int, default=2)
    parser.add_argument("--steps-between", type=int, default=40)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    steps = args.steps_between * (args.drains + 1)
    layout = Layout.parse(args.layout)
    train = TrainOptions(layout=layout, steps=steps, eval_every=0, layers=args.layers, width=args.width)
    nodes = FRAMEWORKS[args.framework].nodes
    leaving = tuple(
        Outside(kind="drain", step=args.steps_between * (index + 1), node=f"node{index}")
        for index in range(args.drains)
    )
    with tempfile.TemporaryDirectory(prefix="hotswap-drain-") as temporary:
        spec = JobSpec(
            directory=Path(temporary) / "drained",
            framework=args.framework,
            train=train,
            nodes=nodes,
            spares=args.drains,
            outside=leaving,
        )
        evidence = run(spec)
        reference = run(replace(spec, directory=Path(temporary) / "reference", spares=0, outside=()))
        difference = first_difference(reference, evidence)
    plain, swaps = gaps_s(evidence.events)
    step_s = statistics.median(plain)
    still = still_s(evidence.events)
    done = [event for event in evidence.events if event["event"] == "recovery_done" and event["cause"] != "start"]
    result = {
        "versions": dict(versions()),
        "framework": args.framework,
        "layout": str(layout),
        "identical": difference is None,
        "drained": sum(event["event"] == "node_drained" for event in evidence.events),
        "redone_steps": [event["redone_steps"] for event in done],
        "plain_step_ms": round(1000 * step_s, 1),
        "standstill_ms": [round(1000 * gap, 1) for gap in still],
        "standstill_in_steps": [round(gap / step_s, 2) for gap in still],
        "pause_ms": [round(1000 * (gap - step_s), 1) for gap in swaps],
        "pause_in_steps": [round((gap - step_s) / step_s, 2) for gap in swaps],
        "phases_ms": [dict(event["phases_ms"]) for event in done],
    }
    print(json.dumps(result, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if difference is not None:
        raise SystemExit(difference)


if __name__ == "__main__":
    main()
