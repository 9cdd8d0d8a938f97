"""How long training stands still after a fault: hotswap, torchft and NVRx's in-process restart, same model, machine and faults.

    python benchmarks/peers.py [--trials 3] [--systems hotswap torchft nvrx] [--faults kill node exception stop] [--minutes 60] [--output peers.json]

Needs `pip install torchft-nightly nvidia-resiliency-ext` (torchft's release works as well); what is missing is named and left out. CPU, gloo.

METHOD
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hotswap
from hotswap.node.process import die_with_parent

SCRIPTS = Path(__file__).with_name("peers")
sys.path.insert(0, str(SCRIPTS))
import toy  # noqa: E402 (the scripts' own folder, which only their path leads to)

METHOD = f"""\
The demonstration's GPT (4 layers of 96) with DistributedDataParallel on two ranks, each a node of its own, and a third node as spare; every
step holds {1000 * toy.DEVICE_S:.0f} ms of sleep for the device. Samples and dropout depend on step and rank only. Rank 1 is struck between forward and backward
(it does so itself) once the spare is ready: SIGKILL of its process (kill) or of all processes of its node (node), SIGSTOP (stop), an exception
from the script (exception).
Time: from the fault to the end of the first step that was not complete before it, on both ranks, minus the median step before
the fault of the same trial. Redone: steps that were complete before the fault and were done again. Equal: SHA-256 of all parameters after the last
step, on both ranks, is that of an undisturbed run of the same system. Systems alternate trial by trial in random order: compare ratios.
hotswap default: `hotswap run --standalone --nnodes 2:3`. Tuned: modules preloaded, --detection-budget-s 1.
torchft default: lighthouse and torchrun lines of its README (min_replicas 2), time-outs of its train_ddp.py, FIXED_WITH_SPARES. Tuned:
heartbeats every 50 ms, lost after 500 ms, gloo 1 s.
NVRx default: its optimal_example.py (gloo 10 s) with a reserve rank, a checkpoint every 10 steps. Tuned: intervals 50 to 200 ms, time-outs 2 to 4 s, gloo 1 s,
a checkpoint at every step. Rank 0 is never struck: it holds NVRx's store, whose loss ends that job."""

FAULTS = {
    "kill": "SIGKILL, process",
    "node": "SIGKILL, node",
    "exception": "exception in the script",
    "stop": "SIGSTOP, process",
}
STEPS, FAULT_STEP = 60, 25
START_S_MAX, RECOVERY_S_MAX, CLEANUP_S_MAX = 90.0, 120.0, 10.0
POLL_S = 0.05
NO_END = "no end within"
TORCHFT_PACKAGES = ("torchft-nightly", "torchft")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process that a trial starts. ``node``: its number where killing a node has to find it."""

    name: str
    line: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    node: int | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """``packages``: any of them has to be installed. ``commands`` gets the trial's folder and whether it is tuned."""

    module: str
    packages: tuple[str, ...]
    commands: Callable[[Path, bool], list[Command]]
    ready: Callable[[Path], bool]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one: ``failure`` is empty if training went on to its end, ``waited`` that the time for that ran out."""

    over_s: float | None = None
    plain_ms: float | None = None
    redone: int | None = None
    parameters: tuple[str, ...] = ()
    failure: str = ""
    waited: bool = False


# --- the systems -------------------------------------------------------------------------------------------------------


def script(name: str) -> str:
    return str(SCRIPTS / f"train_{name}.py")


def free_ports(count: int) -> int:
    """First of *count* ports in a row that nobody uses."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def hotswap_commands(directory: Path, tuned: bool) -> list[Command]:
    options = ("--preload", "torch,hotswap.session.session,toy", "--detection-budget-s", "1") if tuned else ()
    line = (
        *(sys.executable, "-m", "hotswap.cli", "run", "--standalone", "--nnodes", f"{toy.RANKS}:{toy.RANKS + 1}"),
        *("--nproc-per-node", "1", "--rdzv-id", "job", "--log-dir", str(directory), "--redirects", "3", *options),
        script("hotswap"),
    )
    return [Command(name="launcher", line=line)]


def hotswap_ready(directory: Path) -> bool:
    events = directory / "job" / "events.jsonl"
    return events.exists() and '"spare_ready"' in events.read_text()


def torchft_commands(directory: Path, tuned: bool) -> list[Command]:
    ports = free_ports(2 + toy.RANKS)
    times = {"quorum_tick_ms": 100, "join_timeout_ms": 10000}
    if tuned:
        times = {"quorum_tick_ms": 20, "join_timeout_ms": 2000, "heartbeat_timeout_ms": 500}
    lighthouse = (
        *(str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{ports}"),
        *("--min_replicas", str(toy.RANKS)),
        *(word for name, value in times.items() for word in (f"--{name}", str(value))),
    )
    commands = [Command(name="lighthouse", line=lighthouse)]
    for group in range(toy.RANKS + 1):
        line = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "1"),
            *("--max_restarts", "10", "--master_port", str(ports + 1 + group), script("torchft")),
        )
        environment = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{ports}",
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(toy.RANKS + 1),
        }
        commands.append(Command(name=f"group{group}", line=line, environment=environment, node=group))
    return commands


def torchft_ready(directory: Path) -> bool:
    """The third group has completed steps that it added zeros to."""
    return any(record["rank"] < 0 for record in records(directory))


def nvrx_commands(directory: Path, tuned: bool) -> list[Command]:
    ports = free_ports(3)
    return [
        Command(
            name=f"rank{rank}",
            line=(sys.executable, script("nvrx")),
            environment={
                # No LOCAL_RANK: with it, health checks of GPUs come with every restart and end ranks that have none.
                "RANK": str(rank),
                "WORLD_SIZE": str(toy.RANKS + 1),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports),
                "TORCH_CPP_LOG_LEVEL": "error",
            },
            node=rank,
        )
        for rank in range(toy.RANKS + 1)
    ]


def nvrx_ready(directory: Path) -> bool:
    """Its first barrier is for the reserve rank too."""
    return bool(records(directory))


SYSTEMS = {
    "hotswap": System(module="hotswap", packages=("hotswap",), commands=hotswap_commands, ready=hotswap_ready),
    "torchft": System(module="torchft", packages=TORCHFT_PACKAGES, commands=torchft_commands, ready=torchft_ready),
    "nvrx": System(
        module="nvidia_resiliency_ext.inprocess",
        packages=("nvidia-resiliency-ext",),
        commands=nvrx_commands,
        ready=nvrx_ready,
    ),
}


def why_not(system: System) -> str:
    """What keeps it from running here, empty if nothing does. A child imports it: none of it comes into this process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {system.module}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
    )
    if done.returncode == 0:
        return ""
    error = done.stderr.strip().splitlines()[-1]
    if not any(version(package) for package in system.packages):
        return f"needs `pip install {system.packages[0]}` ({error})"
    return error


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    names = ("torch", *TORCHFT_PACKAGES, "nvidia-resiliency-ext")
    found = {name: version(name) for name in names if version(name)}
    return {"python": platform.python_version(), "hotswap": hotswap.__version__, **found}


# --- a trial -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(commands: Sequence[Command], directory: Path, environment: Mapping[str, str]) -> Iterator[list[Any]]:
    """The processes of a trial; whatever happens, none of them or of their children is left."""
    processes: list[subprocess.Popen[bytes]] = []
    mark = str(directory)
    try:
        for command in commands:
            node = {} if command.node is None else {toy.NODE: f"{mark}/{command.node}"}
            with (directory / f"{command.name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command.line,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**environment, **command.environment, **node},
                        start_new_session=True,
                        preexec_fn=end_with_benchmark,  # noqa: PLW1509 (this program has one thread)
                    )
                )
        yield processes
    finally:
        end_all(mark, processes)


def end_with_benchmark() -> None:
    die_with_parent(signal.SIGKILL)


def end_all(mark: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Children are found by the trial's mark in their environment, in whatever session they are."""
    deadline = time.monotonic() + CLEANUP_S_MAX
    while left := toy.processes_with(toy.DIRECTORY, mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.poll()
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} did not end")
        time.sleep(POLL_S)
    for process in processes:
        process.wait(CLEANUP_S_MAX)


def run_trial(system: System, tuned: bool, fault: str, keep: Path) -> Trial:
    keep.mkdir(parents=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(os.path.abspath, filter(None, sys.path))]),
        toy.DIRECTORY: str(keep),
        toy.FAULT: fault,
        toy.STEPS: str(STEPS),
        toy.FAULT_STEP: str(FAULT_STEP),
        toy.TUNED: "1" if tuned else "0",
    }
    with started(system.commands(keep, tuned), keep, environment) as processes:
        failure = watch(system, fault, keep, processes)
    return judge(keep, fault, failure)


def watch(system: System, fault: str, directory: Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Wait for the end; why it did not come, else empty."""
    finals = [directory / f"final{rank}.json" for rank in range(toy.RANKS)]
    struck, go = directory / "struck.json", directory / "go"
    deadline = time.monotonic() + START_S_MAX
    was_struck = False
    while not all(path.exists() for path in finals):
        if not go.exists() and system.ready(directory):
            go.touch()
        if not was_struck and struck.exists():
            was_struck = True
            deadline = time.monotonic() + RECOVERY_S_MAX
        if all(process.poll() is not None for process in processes):
            return f"all processes left, with {[process.returncode for process in processes]}: {last_error(directory)}"
        if time.monotonic() > deadline:
            return f"{NO_END} {RECOVERY_S_MAX if was_struck else START_S_MAX:g} s: {last_error(directory)}"
        time.sleep(POLL_S)
    if fault != "none" and not struck.exists():
        return "the spare was not ready before the run was over"
    return ""


def last_error(directory: Path) -> str:
    """The newest line of the logs that looks like an exception."""
    lines = [
        line.strip()
        for path in sorted(directory.glob("**/*.log"), key=lambda path: path.stat().st_mtime)
        for line in path.read_text(errors="replace").splitlines()
        if "Error" in line
    ]
    return lines[-1][:200] if lines else "no error in the logs"


def records(directory: Path) -> list[dict[str, Any]]:
    """Completed steps; a process may be killed while it writes."""
    found = []
    for path in directory.glob("records/*.jsonl"):
        text = path.read_text()
        found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return sorted(found, key=lambda record: record["time"])


def judge(directory: Path, fault: str, failure: str) -> Trial:
    finals = [directory / f"final{rank}.json" for rank in range(toy.RANKS)]
    parameters = tuple(json.loads(path.read_text())["parameters"] for path in finals if path.exists())
    if fault == "none" or not (directory / "struck.json").exists():
        return Trial(parameters=parameters, failure=failure)
    struck = json.loads((directory / "struck.json").read_text())
    by_rank: list[list[dict[str, Any]]] = [[] for _ in range(toy.RANKS)]
    for record in records(directory):
        if record["rank"] >= 0:
            by_rank[record["rank"]].append(record)
    before = [[r for r in of_rank if r["time"] <= struck["time"]] for of_rank in by_rank]
    after = [[r for r in of_rank if r["time"] > struck["time"]] for of_rank in by_rank]
    plain_s = statistics.median(
        later["time"] - earlier["time"] for earlier, later in zip(before[0][5:], before[0][6:], strict=False)
    )
    # The step that was struck is the first that no system can have completed.
    ends = [next((r["time"] for r in of_rank if r["step"] >= struck["step"]), None) for of_rank in after]
    whole = [end for end in ends if end is not None]
    return Trial(
        over_s=max(whole) - struck["time"] - plain_s if len(whole) == toy.RANKS else None,
        plain_ms=1000 * plain_s,
        waited=failure.startswith(NO_END),
        redone=max(len({r["step"] for r in of_rank if r["step"] < struck["step"]}) for of_rank in after),
        parameters=parameters,
        failure=failure,
    )


# --- all of them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    system: str
    tuned: bool
    fault: str

    @property
    def settings(self) -> str:
        return "tuned" if self.tuned else "default"

    @property
    def name(self) -> str:
        return f"{self.system}-{self.settings}-{self.fault}"


def measure(cells: Sequence[Cell], args: argparse.Namespace, root: Path) -> dict[Cell, list[Trial]]:
    """Fault by fault, in rounds in which all systems take their turns, so that the machine's moods hit all of them."""
    draw = random.Random(args.seed)
    found: dict[Cell, list[Trial]] = {cell: [] for cell in cells}
    deadline = time.monotonic() + 60 * args.minutes
    for fault in args.faults:
        for index in range(args.trials):
            for cell in draw.sample(chosen := [cell for cell in cells if cell.fault == fault], len(chosen)):
                # Waiting for what did not come once tells nothing new.
                if time.monotonic() < deadline and not any(trial.waited for trial in found[cell]):
                    trial = run_trial(SYSTEMS[cell.system], cell.tuned, fault, root / f"{cell.name}-{index}")
                    found[cell].append(trial)
                    over = "-" if trial.over_s is None else f"{trial.over_s:.2f} s"
                    say(f"{fault:10}{cell.system:9}{cell.settings:9}{over:>10}  {trial.failure}")
    return found


def say(text: str) -> None:
    print(text, flush=True)


def undisturbed(cells: Sequence[Cell], root: Path) -> dict[str, tuple[str, ...]]:
    """Final parameters of each system without a fault."""
    found = {}
    for system in dict.fromkeys(cell.system for cell in cells):
        trial = run_trial(SYSTEMS[system], False, "none", root / f"{system}-undisturbed")
        found[system] = trial.parameters
        say(f"undisturbed {system}: {trial.failure or trial.parameters[0][:16]}")
    return found


def summary(cell: Cell, trials: Sequence[Trial], reference: tuple[str, ...]) -> dict[str, Any]:
    times = [trial.over_s for trial in trials if trial.over_s is not None]
    return {
        **vars(cell),
        "trials": len(trials),
        "recovered": len(times),
        "median_s": round(statistics.median(times), 3) if times else None,
        "max_s": round(max(times), 3) if times else None,
        "over_s": [round(value, 3) for value in times],
        "plain_step_ms": [round(trial.plain_ms, 1) for trial in trials if trial.plain_ms is not None],
        "redone": [trial.redone for trial in trials if trial.redone is not None],
        "equal": sum(trial.parameters == reference and len(reference) == toy.RANKS for trial in trials),
        "failures": [trial.failure for trial in trials if trial.failure],
    }


def table(rows: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]) -> str:
    lines = [
        "| fault | system | settings | recovered | median s | max s | x hotswap default | steps redone | parameters equal | plain step ms |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    base = {row["fault"]: row["median_s"] for row in rows if row["system"] == "hotswap" and not row["tuned"]}
    for row in sorted(rows, key=lambda row: (list(FAULTS).index(row["fault"]), row["tuned"])):
        settings = "tuned" if row["tuned"] else "default"
        ours = base.get(row["fault"])
        ratio = f"{row['median_s'] / ours:.1f}" if row["median_s"] and ours else "-"
        numbers = [number(row["median_s"]), number(row["max_s"]), ratio, str(max(row["redone"], default="-"))]
        plain = f"{statistics.median(row['plain_step_ms']):.0f}" if row["plain_step_ms"] else "-"
        count = row["trials"]
        lines.append(
            f"| {FAULTS[row['fault']]} | {row['system']} | {settings} | {row['recovered']} of {count} | {' | '.join(numbers)} "
            f"| {row['equal']} of {count} | {plain} |"
        )
    lines += [f"| all | {name} | - | not runnable: {reason} | | | | | | |" for name, reason in skipped.items()]
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("METHOD", METHOD), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--settings", nargs="+", choices=("default", "tuned"), default=["default", "tuned"])
    parser.add_argument(
        "--minutes", type=float, default=60, help="no trial is begun later; cells then say how many they have"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave logs and records here")
    parser.add_argument("--output", type=Path, default=Path("peers.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the clean-up
    skipped = {name: reason for name in args.systems if (reason := why_not(SYSTEMS[name]))}
    cells = [
        Cell(system=system, tuned=settings == "tuned", fault=fault)
        for fault in args.faults
        for system in args.systems
        for settings in args.settings
        if system not in skipped
    ]
    say(f"{METHOD}\n\n{versions()}, {os.cpu_count()} CPUs\n")
    with tempfile.TemporaryDirectory(prefix="hotswap-peers-") as temporary:
        root = (args.keep or Path(temporary)).resolve()
        loads = [os.getloadavg()]
        references = undisturbed(cells, root)
        found = measure(cells, args, root)
        loads.append(os.getloadavg())
    rows = [summary(cell, trials, references[cell.system]) for cell, trials in found.items()]
    content = {
        "command": " ".join(["python", *sys.argv]),
        "method": METHOD.splitlines(),
        "versions": versions(),
        "cpus": os.cpu_count(),
        "load_averages_before_and_after": loads,
        "undisturbed": references,
        "not_runnable": skipped,
        "cells": rows,
    }
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    say(f"\n{table(rows, skipped)}\n\nwritten to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
