"""What protection costs per step: step time with and without it, in the same processes, on the same work.

    python benchmarks/overhead.py [--programs fsdp2 megatron-dp2 megatron-tp2] [--output overhead.json]
    python benchmarks/overhead.py --programs megatron-tp2-pp2-dp2 hsdp-2x4                      (on eight GPUs)

Each program trains as it does under ``hotswap run``. Blocks of steps with and without hotswap's per-step work (attempt, commit
gate, snapshot, replication) alternate in random order, so that whatever drifts hits both, and the ratio of the two blocks of each
pair is what counts: its mean with a 95 % bootstrap interval, and its median with another, which a hiccup of the machine in one
block leaves alone. Process groups are the same in both; that they cost what plain torch's
cost is shown by collective_cost.py. A protected block begins with so many untimed steps as snapshots are apart, so that it runs
beside the copying and sending of snapshots from its first timed step on; one without begins when the last replica has arrived, with
one untimed step. Only the stream that computes is waited for at the end of a block: waiting for the whole device would
measure the copy. With --parts there are two more kinds of blocks, which say where the time goes: `gate`, attempts and
commit gates but no snapshot, and `copy`, snapshots as well but nothing sent. What the training thread does itself is timed aside
(`host`): of that, the gate is on the way of a device that has nothing to do meanwhile, if the script has just waited for it.

Both "nodes" are on this machine, and replicas travel by TCP over its loopback. Where they are slower than steps, snapshots move
apart until waiting is within --overhead-limit; how far is in the table. On CPUs the ratio says little: copy and training
share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from hotswap.session.pace import PATIENCE, SAMPLES, SAMPLES_MIN

CONFIDENCE = 0.95
RESAMPLES = 4000
HOST_STEPS_MIN = 20
WORKER_S_MAX = 400
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
PARTS = ("gate", "copy")
HOST = {"_enter": "begin", "_pass_gate": "gate", "_exit": "end"}
SIZES = ("layers", "width", "tokens", "rows", "microbatches")


# --- the driver --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the programs one after the other; a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=[*TWO_SLOTS])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block, at least")
    parser.add_argument("--overhead-limit", default="0.001")
    parser.add_argument("--sockets", action="store_true", help="NCCL over TCP: a layout that its network bounds")
    parser.add_argument("--snapshot-interval", default="1")
    parser.add_argument("--transfer-streams", default="0")
    parser.add_argument("--parts", action="store_true", help="also blocks with less than the whole protection")
    parser.add_argument("--output", type=Path, default=Path("overhead.json"))
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[0], help="several: one run for each")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return 0
    results = []
    print(HEADER, flush=True)
    for program in args.programs:
        for case in cases(args):
            result = run(program, case, args)
            results.append(result)
            print(row(result), flush=True)
    content = {"command": " ".join(["python", *sys.argv]), "versions": versions(), "results": results}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def cases(args: argparse.Namespace) -> list[dict[str, int]]:
    """Sizes of each run: options with one value hold for all, those with several are taken in step."""
    count = max(len(getattr(args, name)) for name in SIZES)
    made = []
    for index in range(count):
        values = {name: getattr(args, name)[min(index, len(getattr(args, name)) - 1)] for name in SIZES}
        made.append({name: value for name, value in values.items() if value})
    return made


def run(program: str, sizes: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """One program under ``hotswap run``; slot 0 leaves the result."""
    with tempfile.TemporaryDirectory(prefix="hotswap-overhead-") as directory:
        out = Path(directory) / "result.json"
        order = {"program": program, "sizes": sizes, "out": str(out)}
        order |= {name: getattr(args, name) for name in ("pairs", "steps", "parts")}
        command = [
            *(sys.executable, "-m", "hotswap.cli", "run", "--standalone", "--nnodes", "2"),
            *("--nproc-per-node", str(slots_of(program) // 2)),
            *("--no-preload", "--redirects", "3", "--log-dir", directory, "--rdzv-id", "job"),
            *("--overhead-limit", args.overhead_limit, "--snapshot-interval", args.snapshot_interval),
            *("--transfer-streams", args.transfer_streams),
            *(__file__, "--worker", json.dumps(order)),
        ]
        environment = {**os.environ, **(SOCKETS if args.sockets else {})}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=WORKER_S_MAX, env=environment
        )
        if done.returncode != 0 or not out.exists():
            logs = "".join(path.read_text()[-2000:] for path in Path(directory).glob("job/*/gen*/*.err"))
            raise SystemExit(f"{program} ended with {done.returncode}\n{done.stderr[-2000:]}\n{logs}")
        return {**json.loads(out.read_text()), "nccl_over": "sockets" if args.sockets else "its default"}


HEADER = (
    f"{'program':16}{'params':>9}{'MB/step':>9}{'step ms':>9}{'MB/ms':>7}{'apart':>6}"
    f"{'ratio':>8}{'95 % interval':>18}{'median':>8}{'95 % interval':>18}{'stall ms':>10}{'HBM MB':>8}{'host MB':>9}"
)


def row(result: dict[str, Any]) -> str:
    """A line of the table."""
    low, high = result["interval"]
    lower, upper = result["median_interval"]
    return (
        f"{result['program']:16}{result['parameters'] / 1e6:8.1f}M{result['snapshot_mb']:9.1f}{result['step_ms']:9.2f}"
        f"{result['snapshot_mb'] / result['step_ms']:7.2f}{result['steps_apart']:6d}{result['ratio']:8.4f}"
        f"  [{low:.4f}, {high:.4f}]{result['median']:8.4f}  [{lower:.4f}, {upper:.4f}]{result['stall_ms_per_step']:10.2f}{result['device_extra_mb']:8.1f}"
        f"{result['host_mb']:9.1f}"
        + "".join(f"\n  only {kind}: {part_row(part)}" for kind, part in result["parts"].items())
        + "\n  host, microseconds: "
        + ", ".join(f"{name} {spent:.0f}" for name, spent in result["host_us"].items())
    )


def part_row(part: dict[str, Any]) -> str:
    """Mean and median of a part's ratios, with their intervals."""
    (low, high), (lower, upper) = part["interval"], part["median_interval"]
    return f"{part['ratio']:.4f} [{low:.4f}, {high:.4f}], median {part['median']:.4f} [{lower:.4f}, {upper:.4f}]"


def versions() -> dict[str, str]:
    """Of what was measured."""
    import torch

    from hotswap.demo import report

    found = {**report.versions(), "cpus": str(os.cpu_count())}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


# --- a worker ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained: one call is one step, without what the session does around it."""

    model: Any
    optimizer: Any
    step: Callable[[], None]


def build_hsdp(session: Any, sizes: dict[str, int]) -> Training:
    """The GPT of `build_fsdp2`, sharded within each of two nodes, and the same on both."""
    return build_fsdp2(session, sizes, shards=session.world_size // 2)


def build_fsdp2(session: Any, sizes: dict[str, int], shards: int = 0) -> Training:
    """A GPT in bf16 mixed precision, parameters and optimizer sharded over so many slots each, 0: over all."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hotswap.demo.model import GPT, GPTConfig
    from hotswap.demo.options import TrainOptions
    from hotswap.demo.seeding import training_device

    options = replace(TrainOptions(), **sizes)
    device = training_device()
    heads = max(1, options.width // 64)
    with device:
        model = GPT(
            GPTConfig(tokens=options.tokens, layers=options.layers, width=options.width, heads=heads, dropout=0.0)
        )
    shape = (session.world_size // shards, shards) if shards else (session.world_size,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(0, 256, (options.rows, options.tokens), device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return Training(model=model, optimizer=optimizer, step=step)


def build_megatron(*, tp: int = 1, pp: int = 1, dp: int = 1) -> Callable[[Any, dict[str, int]], Training]:
    """A Megatron-Core GPT in bf16 with the distributed optimizer and overlapped communication."""

    def build(session: Any, sizes: dict[str, int]) -> Training:
        import torch
        from megatron.core import parallel_state, tensor_parallel

        from hotswap.demo import train_megatron as program
        from hotswap.demo.loader import Microbatch
        from hotswap.demo.options import Layout, TrainOptions
        from hotswap.demo.seeding import training_device

        base = TrainOptions(
            layout=Layout(tp=tp, pp=pp, dp=dp), sequence_parallel=tp > 1, bf16=True, overlap=True, dropout=0.0
        )
        options = replace(base, **sizes)
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        program.BUCKET_PARAMETERS = 40_000_000  # Megatron's own default; the demonstration's is for a toy
        model = program.build_model(program.transformer_config(options), options)
        optimizer = program.build_optimizer(model, options)
        tokens = torch.randint(0, 256, (options.rows, options.tokens), device=training_device())
        batches = [Microbatch(tokens=tokens, labels=tokens)] * options.microbatches
        schedule = program.get_forward_backward_func()

        def step() -> None:
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            schedule(
                forward_step_func=program.forward_step,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=len(batches),
                seq_length=options.tokens,
                micro_batch_size=options.rows,
                forward_only=False,
            )
            optimizer.step()

        return Training(model=model, optimizer=optimizer, step=step)

    return build


TWO_SLOTS: dict[str, Callable[[Any, dict[str, int]], Training]] = {
    "fsdp2": build_fsdp2,
    "megatron-dp2": build_megatron(dp=2),
    "megatron-tp2": build_megatron(tp=2),
    "megatron-pp2": build_megatron(pp=2),
}
FOUR_SLOTS = {"megatron-tp2-dp2": build_megatron(tp=2, dp=2), "hsdp-2x2": build_hsdp}
EIGHT_SLOTS = {"megatron-tp2-pp2-dp2": build_megatron(tp=2, pp=2, dp=2), "hsdp-2x4": build_hsdp}
PROGRAMS = TWO_SLOTS | FOUR_SLOTS | EIGHT_SLOTS


def slots_of(program: str) -> int:
    """Workers that a program needs, each with a GPU if there are any, on two nodes."""
    return 8 if program in EIGHT_SLOTS else 4 if program in FOUR_SLOTS else 2


class Meter:
    """Times blocks of steps of one training."""

    def __init__(self, session: Any, training: Training) -> None:
        """Adds up what the session has waited for replicas."""
        import torch

        self.torch = torch
        self.on_gpu = torch.cuda.is_available()
        self.session, self.training = session, training
        self.waited_s = 0.0

    def settle(self) -> None:
        """Wait for this stream, not for the device."""
        if self.on_gpu:
            self.torch.cuda.current_stream().synchronize()

    def protected(self) -> None:
        """A step as a user's script does it."""
        with self.session.attempt():
            self.training.step()
        self.waited_s += self.session._waited_s

    def bare(self) -> None:
        """The same work, without the session's."""
        self.session.rehearsing = True
        self.training.step()
        self.session.rehearsing = False

    def warm_up(self) -> None:
        """Until an interval between snapshots has been agreed on that the first, slow ones have no part in."""
        pace, snapshots, calm = self.session._pace, 0, 0
        while calm < PATIENCE or snapshots < (SAMPLES_MIN + 1 if pace.interval == pace.minimum else 2 * SAMPLES):
            before, interval = self.session._snapshot_step, pace.interval
            self.protected()
            snapshots += self.session._snapshot_step != before
            calm = calm + 1 if pace.interval == interval else 0
        self.settle()

    def block(self, kind: str, steps: int) -> float:
        """Seconds of *steps* steps of a kind, after untimed ones."""
        step = self.bare if kind == "bare" else self.protected
        session = self.session
        if kind in ("bare", "gate"):
            session._snapshots.wait_acked(session.generation, session._snapshot_step)
        with contextlib.ExitStack() as less:
            if kind == "gate":
                less.enter_context(mock.patch.object(session, "_snapshot_is_due", lambda: False))
            elif kind == "copy":
                less.enter_context(mock.patch.object(session._announcer, "add", self._keep))
                less.enter_context(mock.patch.object(session._pace, "note_latency", lambda _: None))
            for _ in range(session._pace.interval if kind in ("copy", "protected") else 1):
                step()
            self.settle()
            self.waited_s = 0.0
            began = time.monotonic()
            for _ in range(steps):
                step()
            self.settle()
            return time.monotonic() - began

    def _keep(self, written: Any, *, durable: bool) -> None:
        """A snapshot that nobody is sent; to this slot it is as if it were at its holder. Called under the mailbox's lock."""
        del durable
        self.session._mailbox.acked = written.step

    def host(self, steps: int) -> dict[str, float]:
        """Microseconds of the training thread in each of the session's parts of a step, medians; those with a snapshot apart."""
        session = self.session
        spent: dict[str, float] = defaultdict(float)
        found: dict[str, list[float]] = defaultdict(list)

        def timed(name: str) -> Callable[..., Any]:
            inner = getattr(session, name)

            def call(*arguments: Any) -> Any:
                began = time.perf_counter()
                result = inner(*arguments)
                spent[name] += 1e6 * (time.perf_counter() - began)
                return result

            return call

        with contextlib.ExitStack() as patches:
            for name in HOST:
                patches.enter_context(mock.patch.object(session, name, timed(name)))
            for _ in range(steps):
                before = session._snapshot_step
                spent.clear()
                self.protected()
                for name, microseconds in spent.items():
                    with_snapshot = name == "_exit" and session._snapshot_step != before
                    found[HOST[name] + (", snapshot" if with_snapshot else "")].append(microseconds)
        return {name: statistics.median(values) for name, values in found.items()}

    def peak(self, step: Callable[[], None]) -> int:
        """Bytes of device memory in use at most during a step."""
        if not self.on_gpu:
            return 0
        self.torch.cuda.reset_peak_memory_stats()
        step()
        self.settle()
        return int(self.torch.cuda.max_memory_allocated())


def work(order: dict[str, Any]) -> None:
    """The training script: warm up, then pairs of blocks; every slot does the same, slot 0 writes the result."""
    import hotswap

    session = hotswap.init()
    training = PROGRAMS[order["program"]](session, order["sizes"])
    session.protect(model=training.model, optimizer=training.optimizer)
    assert session.step == 0
    meter = Meter(session, training)
    meter.warm_up()
    # Whole intervals in every block: half of one would hold a snapshot or none, by chance.
    apart = session._pace.interval
    steps = -(-order["steps"] // apart) * apart
    draw = random.Random(0)
    kinds = ["bare", "protected", *(PARTS if order["parts"] else ())]
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds[1:]}
    stalls, times = [], []
    for _ in range(order["pairs"]):
        found = {}
        for kind in draw.sample(kinds, len(kinds)):
            found[kind] = meter.block(kind, steps)
            if kind == "protected":
                stalls.append(meter.waited_s)
        times.append(found["bare"] / steps)
        for kind, values in ratios.items():
            values.append(found[kind] / found["bare"])
    host = meter.host(max(2 * steps, HOST_STEPS_MIN))
    extra = meter.peak(meter.protected) - meter.peak(meter.bare)
    if session.slot == 0:
        layout = session._state().plan()
        chunks = training.model if isinstance(training.model, list) else [training.model]
        result = {
            **{key: order[key] for key in ("program", "sizes")},
            "steps": steps,
            "parameters": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
            "snapshot_mb": layout.nbytes / 1e6,
            "replica_mb": layout.unique_nbytes / 1e6,
            "host_mb": 2 * (layout.nbytes + layout.unique_nbytes) / 1e6,
            "step_ms": statistics.median(times) * 1e3,
            "steps_apart": session._pace.interval,
            **summary(ratios["protected"]),
            "stall_ms_per_step": statistics.fmean(stalls) / steps * 1e3,
            "device_extra_mb": extra / 1e6,
            "host_us": host,
            "parts": {kind: summary(ratios[kind]) for kind in kinds[2:]},
        }
        Path(order["out"]).write_text(json.dumps(result))


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """Mean, median and their intervals."""
    return {
        "ratio": statistics.fmean(ratios),
        "interval": bootstrap(ratios, statistics.fmean),
        "median": statistics.median(ratios),
        "median_interval": bootstrap(ratios, statistics.median),
        "pairs": [round(ratio, 5) for ratio in ratios],
    }


def bootstrap(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """The interval in which the mean or median lies with 95 % confidence."""
    draw = random.Random(0)
    found = sorted(middle(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return found[int(tail * RESAMPLES)], found[int((1 - tail) * RESAMPLES) - 1]


if __name__ == "__main__":
    sys.exit(main())
