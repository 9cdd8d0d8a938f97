"""Does training notice that its coordinator is gone, and how soon is a node replaced that was lost meanwhile?

    python benchmarks/coordinator_gone.py [--gone-s 60] [--rounds 2] [--output docs/measured/coordinator_gone.json]

One job of two nodes and a spare on this machine, with a coordinator of its own (`hotswap coordinator`). It trains for a while; the
coordinator is killed and stays away for --gone-s seconds; training goes on for a while after its return, and it is taken away again, and
so on: stretches with it and without it, of the same length, in turns, so that whatever else the machine does falls on both. The
median step of each stretch without it is divided by the mean of those before and after it; `ratio` is the median of that. In the last absence, 5 s before its end, all processes of a node are killed: `resumed_s` is the time
from the coordinator's return to the first step that is committed with the spare. Every loss of every step must be bit for bit that of a
run that nothing has happened to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hotswap
from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.records import read_records

SCRIPT = Path(hotswap.__file__).parent / "demo" / "train_ddp.py"
STEPS = "HOTSWAP_BENCH_STEPS"
LOSS_BEFORE_RETURN_S = 5.0
RETURN_S = 1.0
"""What an agent may take to find a coordinator that is back."""
START_S = 120.0
STEPS_ENOUGH = 1_000_000
"""The job is ended when all is measured."""


def in_worker() -> None:
    """The training, with a line for the beginning of each step; it ends when the file ``stop`` says at which step."""
    from hotswap.demo.loader import ExactlyOnceLoader

    original = ExactlyOnceLoader.next_step
    path = Path(os.environ[STEPS]) / f"steps-{os.environ['RANK']}-{os.getpid()}"

    def next_step(self: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{self.position} {time.time()}\n")
        return original(self)

    ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Run:
    """The job and its coordinator."""

    def __init__(self, directory: Path, train: TrainOptions) -> None:
        self.directory = directory
        directory.mkdir()
        self._token = directory / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._address = "127.0.0.1:0"
        self.coordinator = self.start_coordinator()
        command = [
            *(sys.executable, "-m", "hotswap.cli", "run", "--standalone", "--nnodes", "2:3", "--nproc-per-node", "1"),
            *("--coordinator", self._address, "--token-file", str(self._token), "--log-dir", str(directory)),
            *("--rdzv-id", "job", "--redirects", "3", "--overhead-limit", "0"),
            *(__file__, "--worker", str(SCRIPT), *train.to_arguments(), "--out", str(directory)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", STEPS: str(directory)}
        with (directory / "launcher.log").open("wb") as log:
            self.launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def start_coordinator(self, *more: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "hotswap.cli", "coordinator", "--nnodes", "2:3", "--nproc-per-node", "1"),
            *("--listen", self._address, "--token-file", str(self._token), "--rdzv-id", "job"),
            *("--log-dir", str(self.directory), *more),
        ]
        with (self.directory / "coordinator.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        self._address = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        return process

    def take_coordinator_away(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def bring_coordinator_back(self) -> float:
        self.coordinator = self.start_coordinator("--go-on")
        return time.time()

    def events(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        path = self.directory / "job" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["event"] == name and event["time"] >= after]

    def wait_for(self, name: str, after: float = 0.0) -> dict[str, Any]:
        end = time.monotonic() + START_S
        while not (found := self.events(name, after)):
            if time.monotonic() > end or self.launcher.poll() is not None:
                raise SystemExit(f"no {name}; see {self.directory}")
            time.sleep(0.02)
        return found[0]

    def kill_node(self, name: str) -> None:
        if self.launcher.poll() is not None:
            raise SystemExit(f"the job has ended; see {self.directory}")
        pids = json.loads((self.directory / "job" / "pids.json").read_text())
        os.killpg(pids["agents"][name], signal.SIGKILL)

    def step_times(self) -> list[tuple[float, float]]:
        """Beginning and length of the steps of slot 0, which no fault touches."""
        times = []
        for path in self.directory.glob("steps-0-*"):
            lines = [line.split() for line in path.read_text().splitlines()]
            begins = [(int(step), float(at)) for step, at in lines]
            times += [(at, later - at) for (step, at), (n, later) in itertools.pairwise(begins) if n == step + 1]
        return times

    def close(self) -> None:
        for process in (self.launcher, self.coordinator):
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def measure(directory: Path, train: TrainOptions, gone_s: float, rounds: int) -> dict[str, Any]:
    run = Run(directory, train)
    stretches: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    try:
        run.wait_for("spare_ready")
        run.wait_for("step_committed")
        time.sleep(3)
        for last in [False] * (rounds - 1) + [True]:
            began = time.time()
            time.sleep(gone_s - LOSS_BEFORE_RETURN_S)
            stretches["with"].append((began, time.time()))
            run.take_coordinator_away()
            began = time.time()
            time.sleep(gone_s - LOSS_BEFORE_RETURN_S)
            stretches["without"].append((began, time.time()))
            if last:
                run.kill_node("node1")
            time.sleep(LOSS_BEFORE_RETURN_S)
            back_at = run.bring_coordinator_back()
            took_over = run.wait_for("coordinator_took_over", back_at - 1)
            if not last:
                time.sleep(RETURN_S)
        done = run.wait_for("recovery_done", back_at - 1)
        began = time.time()
        time.sleep(gone_s - LOSS_BEFORE_RETURN_S)
        stretches["with"].append((began, time.time()))
        steps = run.step_times()
    finally:
        run.close()
    medians = {
        name: [statistics.median(n for at, n in steps if begin <= at and at + n <= end) for begin, end in spans]
        for name, spans in stretches.items()
    }
    beside = [(before + after) / 2 for before, after in itertools.pairwise(medians["with"])]
    ratios = [gone / there for gone, there in zip(medians["without"], beside, strict=True)]
    return {
        "gone_s": gone_s,
        "median_step_ms": {name: [round(1000 * value, 2) for value in values] for name, values in medians.items()},
        "ratios": [round(value, 3) for value in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "took_over_s": round(took_over["time"] - back_at, 3),
        "resumed_s": round(done["time"] - back_at, 3),
        "redone_steps": done["redone_steps"],
    }


def losses(directory: Path) -> dict[tuple[int, int], str | None]:
    """Of each step and slot, exactly; of a step that was done again, the last time."""
    return {(record.step, record.slot): record.loss for record in read_records(directory)}


def differing(disturbed: Path, reference: Path, train: TrainOptions) -> tuple[int, int]:
    """Over how many steps an undisturbed run was compared, and in how many losses it differs."""
    reference.mkdir()
    command = [
        *(sys.executable, "-m", "hotswap.cli", "run", "--standalone", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--redirects", "3", "--overhead-limit", "0", "--log-dir", str(reference), str(SCRIPT)),
        *(*train.to_arguments(), "--out", str(reference)),
    ]
    found, same = losses(disturbed), dict[tuple[int, int], str | None]()
    last = max(step for step, _ in found) - 1
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None:
            time.sleep(2)
            same = losses(reference) if (reference / "records").exists() else {}
            if same and max(step for step, _ in same) > last:
                process.terminate()
                break
    wrong = [key for key, loss in found.items() if key[0] <= last and same.get(key) != loss]
    return last + 1, len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gone-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    train = TrainOptions(
        layout=Layout(dp=2), steps=STEPS_ENOUGH, eval_every=0, tokens=64, width=64, layers=2, rows=2, warmup=2
    )
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="hotswap-bench-") as folder:
        found = measure(Path(folder) / "disturbed", train, args.gone_s, args.rounds)
        compared, wrong = differing(Path(folder) / "disturbed", Path(folder) / "reference", train)
    command_line = " ".join(["python", "benchmarks/coordinator_gone.py", *sys.argv[1:]])
    result = {
        "command": command_line,
        "load_average": round(load, 1),
        **found,
        "steps_compared": compared,
        "losses_that_differ": wrong,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        del sys.argv[1]
        in_worker()
    else:
        main()
