"""How soon a fault is noticed and training goes on, for faults that no closed connection announces; and whether load alone costs a node.

    python benchmarks/detection.py [--repeat 2] [--output detection.json]
    python benchmarks/detection.py --load 600 [--burners 4]

Every fault strikes from inside at a random moment of a step, at a random slot, several times in each job, with hotswap's
defaults; what differs from them is named in the table. `noticed` is the time from the fault to the event by which the
coordinator or an agent gives the worker or node up; `resumed` runs to the end of the first newly committed step. The runs are
compared with an undisturbed one, bit for bit.

With --load, a job trains for so many seconds while other processes burn processor time, write to the disk and start
processes all the time; any loss is a false one. The load average and the longest pauses of agents are printed.

Times are wall-clock on whatever machine this runs on; the load average at the start says what else it did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotswap.config import Timing
from hotswap.demo.plan import FRAMEWORKS
from hotswap.demo.runner import JobSpec, run_job
from hotswap.demo.verdict import Evidence, first_difference, gather
from hotswap.session.faults import Fault

FIRST_STEP, STEPS_BETWEEN = 12, 8
FAULTS_PER_JOB = 3
NOTICED = ("worker_lost", "node_lost")
FRAMEWORK = "fsdp2"
BURN = "while True: sum(i * i for i in range(10000))"
WRITE = "import os,sys\nwhile True:\n f = open(sys.argv[1], 'wb'); f.write(os.urandom(1 << 22)); f.flush(); os.fsync(f.fileno())"
START = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', 'import json, asyncio'])"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row. ``flags``: what is not the default."""

    name: str
    scope: str
    flags: tuple[str, ...] = ()
    repeat: int | None = None
    faults: int = FAULTS_PER_JOB


KINDS = (
    Kind(name="worker: SIGKILL", scope="worker"),
    Kind(name="node: SIGKILL", scope="node"),
    Kind(name="worker: SIGSTOP", scope="stop-worker"),
    Kind(name="node: SIGSTOP of all its processes", scope="stop-node"),
    Kind(name="main thread hangs", scope="hang", flags=("--hang-budget-s", "5")),
    Kind(name="main thread hangs", scope="hang", repeat=1, faults=1),
)


def job(directory: Path, faults: Sequence[Fault], flags: Sequence[str], steps: int, spares: int) -> JobSpec:
    framework = FRAMEWORKS[FRAMEWORK]
    train = replace(framework.defaults, steps=steps, eval_every=0)
    return JobSpec(
        directory=directory,
        framework=FRAMEWORK,
        train=train,
        nodes=framework.nodes,
        spares=spares,
        faults=tuple(faults),
        run_arguments=tuple(flags),
    )


def run(spec: JobSpec) -> Evidence:
    code = run_job(spec)
    if code != 0:
        raise SystemExit(f"a job ended with {code}; its logs are in {spec.directory}")
    return gather(spec.directory, spec.logs / "events.jsonl", spec.fault_log, spec.train, code)


def draw(dice: random.Random, kind: Kind) -> list[Fault]:
    framework = FRAMEWORKS[FRAMEWORK]
    return [
        Fault(
            step=FIRST_STEP + STEPS_BETWEEN * index,
            moment=dice.choice(framework.moments),
            slot=dice.randrange(framework.defaults.layout.slots),
            scope=kind.scope,
            generation=index + 1,
        )
        for index in range(kind.faults)
    ]


def answers(evidence: Evidence) -> list[tuple[float, float]]:
    """Seconds from each fault to its being noticed, and to the first new step."""
    found = []
    for fault in evidence.deaths:
        struck = float(fault["time"])
        after = [event for event in evidence.events if float(event["time"]) >= struck]
        noticed = next(float(event["time"]) for event in after if event["event"] in NOTICED)
        resumed = next(float(event["time"]) for event in after if event["event"] == "recovery_done")
        found.append((noticed - struck, resumed - struck))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def measure(kind: Kind, root: Path, repeat: int, reference: Evidence, steps: int) -> dict[str, Any]:
    times: list[tuple[float, float]] = []
    different = []
    for index in range(kind.repeat or repeat):
        faults = draw(random.Random(f"{kind.name} {index}"), kind)
        spares = kind.faults if kind.scope.endswith("node") else 1
        directory = root / f"{kind.scope}-{len(kind.flags)}-{index}"
        evidence = run(job(directory, faults, kind.flags, steps, spares))
        times += answers(evidence)
        difference = first_difference(reference, evidence)
        if difference is not None or len(evidence.deaths) != kind.faults:
            different.append(difference or f"{len(evidence.deaths)} of {kind.faults} faults happened")
    noticed, resumed = zip(*times, strict=True)
    return {
        "fault": kind.name,
        "flags": " ".join(kind.flags),
        "count": len(times),
        "noticed_s": {name: round(percentile(noticed, share), 2) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "resumed_s": {name: round(percentile(resumed, share), 2) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "different": different,
    }


# --- load --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def burning(count: int, directory: Path) -> Iterator[None]:
    """*count* processes that compute, one that writes, one that starts others; nice values as everybody's."""
    commands = [[sys.executable, "-c", BURN]] * count
    commands += [[sys.executable, "-c", WRITE, str(directory / "written")], [sys.executable, "-c", START]]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_load(root: Path, seconds: float, burners: int) -> dict[str, Any]:
    averages: list[float] = []
    end = time.monotonic() + seconds
    counts = {"steps": 0, "losses": 0, "recoveries": 0}

    class Enough(Exception):
        pass

    def notice(event: Mapping[str, Any]) -> None:
        counts["steps"] += event.get("event") == "step_committed"
        counts["losses"] += event.get("event") in NOTICED
        counts["recoveries"] += event.get("event") == "recovery_started"
        averages.append(os.getloadavg()[0])
        if time.monotonic() > end:
            raise Enough

    spec = replace(job(root / "load", (), (), 10**6, 1), timeout_s=seconds + 120)
    with burning(burners, root), contextlib.suppress(Enough):
        run_job(spec, notice)
    logs = [path.read_text() for path in (*spec.logs.glob("*/agent.log"), spec.logs / "coordinator.log")]
    late = [float(found) for log in logs for found in re.findall(r"did not (?:get to )?run for ([\d.]+) s", log)]
    return {
        "seconds": seconds,
        "cpus": os.cpu_count(),
        "burners": burners,
        "load_average": {"mean": round(sum(averages) / len(averages), 1), "max": round(max(averages), 1)},
        "committed_steps": counts["steps"],
        "false_losses": counts["losses"],
        "recoveries": counts["recoveries"] - 1,
        "late_by_more_than_a_heartbeat_s": sorted(late, reverse=True)[:20],
    }


def show(result: Mapping[str, Any]) -> None:
    for row in result["rows"]:
        noticed, resumed = row["noticed_s"], row["resumed_s"]
        print(
            f"{row['fault']:36} {row['flags'] or 'defaults':20} {row['count']:3}   noticed {noticed['p50']:6.2f} /"
            f" {noticed['p99']:6.2f}   resumed {resumed['p50']:6.2f} / {resumed['p99']:6.2f}   s, p50 / p99"
        )
        for line in row["different"]:
            print(f"  DIFFERENT {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2, help=f"jobs with {FAULTS_PER_JOB} faults each, for each kind")
    parser.add_argument("--only", default="", help="only kinds whose name has this in it")
    parser.add_argument("--load", type=float, default=0.0, metavar="S", help="the false-loss run, of so many seconds")
    parser.add_argument("--burners", type=int, default=4, help="processes that compute beside the job")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "cpus": os.cpu_count(),
        "load_average_before": os.getloadavg(),
        "detection_budget_s": Timing().detection_budget_s,
    }
    with tempfile.TemporaryDirectory(prefix="hotswap-bench-") as directory:
        root = Path(directory)
        if args.load:
            result["load"] = measure_load(root, args.load, args.burners)
            print(json.dumps(result["load"], indent=1))
            good = not result["load"]["false_losses"]
        else:
            steps = FIRST_STEP + STEPS_BETWEEN * FAULTS_PER_JOB
            reference = run(job(root / "reference", (), (), steps, 0))
            kinds = [kind for kind in KINDS if args.only in kind.name]
            result["rows"] = [measure(kind, root, args.repeat, reference, steps) for kind in kinds]
            show(result)
            good = not any(row["different"] for row in result["rows"])
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
