"""How long a job stands still when something dies, and whether many recoveries leave anything behind.

    python benchmarks/recovery.py [--jobs 4] [--output recovery.json]
    python benchmarks/recovery.py --layout dp2 --layers 24 --width 2048 --bf16 --overlap ...    (on two GPUs)
    python benchmarks/recovery.py --layout tp2,pp2,dp2 --rebuild all ...                        (on eight)

Kills: random slots, as a worker or with the whole node, at random moments of the step, with hotswap's defaults, several in each
job. The layout is that of the demonstration (Megatron-Core, 8 workers) unless options say otherwise; with GPUs there has to be
one for each slot, and a spare waits on those of the node that it replaces. `total` runs from the SIGKILL to the end of the first newly
committed step; `over a plain step` is total minus the median time between commits of undisturbed steps of the same job.
`kept` is how many process groups a recovery kept; with `--rebuild all` and the same seed the same kills keep none, which shows what
keeping saves. GB/s is the snapshot of a slot by the time of *restore*.
Swaps in a row: one job in which thirty workers die one after the other; memory, descriptors and threads of the processes that
live from the first to the last of them are read from /proc all along.

Times are wall-clock on whatever machine this runs on: compare ratios, and do not run anything beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.plan import FRAMEWORKS
from hotswap.demo.report import versions
from hotswap.demo.runner import JobSpec, run_job
from hotswap.demo.verdict import Evidence, Recovery, first_difference, gather, recoveries
from hotswap.session.faults import Fault

SWAPS_IN_A_ROW = 30
SAMPLE_S = 0.5
SIZES = ("layers", "width", "tokens", "rows", "microbatches", "virtual_stages")
SWITCHES = ("bf16", "overlap", "sequence_parallel", "compile")
PHASES = ("detect", "fence", "plan", "rebuild", "restore", "redo", "total")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is trained, and how often it is disturbed: ``node_kills`` of the ``kills`` of each job take a whole node."""

    framework: str
    train: TrainOptions
    kills: int
    node_kills: int
    spares: int
    first_step: int
    steps_between: int
    worker_loss: str
    rebuild: str
    nodes: int

    @property
    def steps(self) -> int:
        return self.first_step + self.steps_between * self.kills

    def job(self, directory: Path, faults: Sequence[Fault], spares: int, steps: int) -> JobSpec:
        return JobSpec(
            directory=directory,
            framework=self.framework,
            train=replace(self.train, steps=steps, eval_every=0),
            nodes=self.nodes,
            spares=spares,
            faults=tuple(faults),
            run_arguments=("--worker-loss", self.worker_loss, "--rebuild", self.rebuild),
        )


def draw_kills(draw: random.Random, program: Program) -> list[Fault]:
    scopes = ["node"] * program.node_kills + ["worker"] * (program.kills - program.node_kills)
    draw.shuffle(scopes)
    return [
        Fault(
            step=program.first_step + program.steps_between * index,
            moment=draw.choice(FRAMEWORKS[program.framework].moments),
            slot=draw.randrange(program.train.layout.slots),
            scope=scope,
            generation=index + 1,
        )
        for index, scope in enumerate(scopes)
    ]


def run(spec: JobSpec, notice: Any = lambda _: None) -> Evidence:
    code = run_job(spec, notice)
    if code != 0:
        raise SystemExit(f"a job ended with {code}; its logs are in {spec.directory}")
    return gather(spec.directory, spec.logs / "events.jsonl", spec.fault_log, spec.train, code)


def plain_step_ms(events: Sequence[Mapping[str, Any]]) -> float:
    """Median time between commits that follow each other within a generation, the first of each left out."""
    commits = [event for event in events if event["event"] == "step_committed"]
    gaps = [
        1000 * (later["time"] - earlier["time"])
        for before, earlier, later in zip(commits, commits[1:], commits[2:], strict=False)
        if before["generation"] == later["generation"]
    ]
    return statistics.median(gaps)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(percentile(values, 0.5), 1),
        "p99": round(percentile(values, 0.99), 1),
        "max": round(max(values), 1),
    }


def measure_kills(program: Program, root: Path, jobs: int, seed: int, console: Console) -> dict[str, Any]:
    reference = run(program.job(root / "reference", (), 0, program.steps))
    seen: list[tuple[Recovery, float, int]] = []
    different, promotions = [], Counter[str]()
    for index in range(jobs):
        faults = draw_kills(random.Random(seed + index), program)
        evidence = run(program.job(root / f"kills-{index}", faults, program.spares, program.steps))
        found = recoveries(evidence)
        plain = plain_step_ms(evidence.events)
        promoted = [event for event in evidence.events if event["event"] == "spare_promoted"]
        planned = {e["generation"]: int(e["keep"]) for e in evidence.events if e["event"] == "recovery_planned"}
        seen += [(recovery, recovery.phases_ms["total"] - plain, planned[recovery.generation]) for recovery in found]
        promotions.update("hot" if event["hot"] else "cold" for event in promoted)
        promotions["none"] += len(found) - len({event["generation"] for event in promoted})
        difference = first_difference(reference, evidence)
        if difference is not None or len(found) != len(faults):
            different.append(f"job {index}: {difference or 'a death was not answered'}")
        console.print(
            f"job {index + 1} of {jobs}: {len(found)} kills, {'identical' if difference is None else difference}"
        )
    result: dict[str, Any] = {"kills": len(seen), "different": different, "spares promoted": dict(promotions)}
    for scope in ("worker", "node", "all"):
        chosen = [item for item in seen if scope in ("all", item[0].death["kind"])]
        if not chosen:
            continue
        result[scope] = {phase: summary([r.phases_ms[phase] for r, _, _ in chosen]) for phase in PHASES}
        result[scope]["over a plain step"] = summary([over for _, over, _ in chosen])
        result[scope] |= {"kills": len(chosen), "kept": summary([kept for _, _, kept in chosen])}
    sizes = [json.loads(path.read_text())["snapshot_nbytes"] for path in (root / "reference/final").glob("slot*.json")]
    result["snapshot_mb"] = round(max(sizes) / 1e6, 1)
    result["recoveries"] = [
        {"death": dict(r.death), "phases_ms": dict(r.phases_ms), "over_ms": round(over, 1), "kept": kept}
        for r, over, kept in seen
    ]
    return result


@dataclass(kw_only=True)
class Sampler:
    """Reads /proc for every process of the job's agents' groups, now and then."""

    logs: Path
    due: float = 0.0
    samples: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    rounds: int = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        path = self.logs / "pids.json"
        if time.monotonic() < self.due or not path.exists():
            return
        self.due = time.monotonic() + SAMPLE_S
        groups = set(json.loads(path.read_text())["agents"].values())
        self.rounds += 1
        for name in os.listdir("/proc"):
            if name.isdigit():
                self._sample(int(name), groups)

    def _sample(self, pid: int, groups: set[int]) -> None:
        try:
            if os.getpgid(pid) not in groups:
                return
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            self.samples[pid].append((int(status["RssAnon"].split()[0]), descriptors, int(status["Threads"])))
        except (OSError, KeyError):
            return

    def survivors(self) -> list[list[tuple[int, int, int]]]:
        """Samples of the processes that were there nearly all the time."""
        return [samples for samples in self.samples.values() if len(samples) > 0.8 * self.rounds]


def measure_swaps_in_a_row(program: Program, root: Path) -> dict[str, Any]:
    slots = program.train.layout.slots
    # One slot of each half lives through all of them.
    victims = [slot for slot in range(slots) if slot % (slots // 2)] or [1]
    faults = [
        Fault(
            step=6 + 2 * index,
            moment=("backward", "optimizer", "replicate")[index % 3],
            slot=victims[index % len(victims)],
            generation=index + 1,
        )
        for index in range(SWAPS_IN_A_ROW)
    ]
    spec = program.job(root / "row", faults, 0, 6 + 2 * SWAPS_IN_A_ROW + 6)
    sampler = Sampler(logs=spec.logs)
    evidence = run(spec, sampler)
    kept = sampler.survivors()
    columns = {"anonymous memory (KiB)": 0, "descriptors": 1, "threads": 2}
    report: dict[str, Any] = {
        "swaps": len(recoveries(evidence)),
        "processes": len(kept),
        "samples_each": sampler.rounds,
    }
    for name, column in columns.items():
        early, late = [], []
        for samples in kept:
            third = max(1, len(samples) // 3)
            early.append(statistics.median(sample[column] for sample in samples[third // 2 : third + third // 2]))
            late.append(statistics.median(sample[column] for sample in samples[-third:]))
        report[name] = {"first_third": sum(early), "last_third": sum(late), "ratio": round(sum(late) / sum(early), 3)}
    return report


def show(result: Mapping[str, Any], console: Console) -> None:
    kills = result["kills"]
    table = Table(title=f"{kills['kills']} kills, ms: p50 / p99", title_justify="left")
    table.add_column("what died")
    table.add_column("kills", justify="right")
    table.add_column("kept", justify="right")
    for phase in (*PHASES, "over a plain step"):
        table.add_column(phase, justify="right")
    for scope in ("worker", "node", "all"):
        if (row := kills.get(scope)) is None:
            continue
        cells = [f"{row[phase]['p50']:.0f} / {row[phase]['p99']:.0f}" for phase in (*PHASES, "over a plain step")]
        table.add_row(scope, str(row["kills"]), f"{row['kept']['p50']:.0f}", *cells)
    console.print(table)
    console.print(f"spares promoted: {kills['spares promoted']}")
    rate = kills["snapshot_mb"] / kills["all"]["restore"]["p50"]
    console.print(f"snapshot of a slot: {kills['snapshot_mb']} MB, restored at {rate:.2f} GB/s (median)")
    for line in kills["different"]:
        console.print(f"DIFFERENT {line}")
    row = result["swaps_in_a_row"]
    if row is None:
        return
    console.print(
        f"{row['swaps']} swaps in a row, sum over the {row['processes']} processes that lived through all of them:"
    )
    for name in ("anonymous memory (KiB)", "descriptors", "threads"):
        console.print(
            f"  {name}: {row[name]['first_third']:.0f} -> {row[name]['last_third']:.0f} (x{row[name]['ratio']})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="jobs with so many kills each")
    parser.add_argument("--kills", type=int, default=6, help="kills in a job")
    parser.add_argument("--node-kills", type=int, default=2, help="of which so many are of whole nodes")
    parser.add_argument("--spares", type=int, help="spares of a job; as many as nodes are killed by default")
    parser.add_argument(
        "--first-step", type=int, default=12, help="step of the first kill; on GPUs spares need a while"
    )
    parser.add_argument("--steps-between", type=int, default=5)
    parser.add_argument(
        "--nodes", type=int, help="on how many nodes the slots are; the demonstration's number by default"
    )
    parser.add_argument("--rebuild", default="touched", help="as for hotswap run")
    parser.add_argument("--worker-loss", default="auto", help="as for hotswap run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("recovery.json"))
    parser.add_argument("--no-row", action="store_true", help="leave the swaps in a row out")
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="megatron")
    parser.add_argument("--layout", type=Layout.parse)
    for name in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    for name in SWITCHES:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    args = parser.parse_args()
    changes = {name: getattr(args, name) for name in ("layout", *SIZES, *SWITCHES) if getattr(args, name)}
    train = replace(FRAMEWORKS[args.framework].defaults, **changes)
    program = Program(
        framework=args.framework,
        train=train,
        nodes=args.nodes or min(FRAMEWORKS[args.framework].nodes, train.layout.slots),
        rebuild=args.rebuild,
        kills=args.kills,
        node_kills=args.node_kills,
        spares=args.node_kills if args.spares is None else args.spares,
        first_step=args.first_step,
        steps_between=args.steps_between,
        worker_loss=args.worker_loss,
    )
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="hotswap-bench-") as directory:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "versions": versions(),
            "cpus": os.cpu_count(),
            "train": {item.name: str(getattr(program.train, item.name)) for item in fields(program.train)},
            "kills": measure_kills(program, Path(directory), args.jobs, args.seed, console),
            "swaps_in_a_row": None if args.no_row else measure_swaps_in_a_row(program, Path(directory)),
        }
    show(result, console)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {args.output}")
    return 1 if result["kills"]["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
