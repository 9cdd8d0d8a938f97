"""``hotswap plan``: what a job's protection takes in memory and network, and which losses it survives."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from hotswap.errors import EXIT_OK, UsageError
from hotswap.planning.budget import SHARDINGS, Budget, Job, budget, expand, state_nbytes

GIB = 1 << 30
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def main(argv: Sequence[str]) -> int:
    """Entry point of ``hotswap plan``. UsageError for numbers that fit no job."""
    args = _parser().parse_args(argv)
    slots = args.nnodes * args.nproc_per_node
    shared, unique = state_nbytes(
        _number(args.parameters),
        sharding=args.sharding,
        slots=slots,
        model_parallel=args.model_parallel,
        state_bytes=args.state_bytes,
    )
    job = Job(
        nodes=args.nnodes,
        width=args.nproc_per_node,
        replicas=args.replicas,
        shared_nbytes=shared,
        unique_nbytes=unique,
        domains=expand(args.fault_domain),
        checkpoints=args.checkpoints,
        integrity=args.integrity,
        link_bytes_s=args.link_gbit * 1e9 / 8,
        snapshot_interval=args.snapshot_interval,
    )
    found = budget(job)
    if args.json:
        print(json.dumps({"shared_nbytes": shared, "unique_nbytes": unique, **asdict(found)}))
    else:
        print("\n".join(_text(job, found, args.step_s)))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, required=True, help="nodes that train")
    parser.add_argument("--nproc-per-node", type=int, required=True, help="workers of a node")
    parser.add_argument("--parameters", required=True, metavar="N", help="of the whole model, such as 70b")
    parser.add_argument(
        "--sharding",
        choices=SHARDINGS,
        default="optimizer",
        help="over data-parallel workers: none (DDP), optimizer (ZeRO-1, Megatron's distributed optimizer), full (FSDP)",
    )
    parser.add_argument(
        "--model-parallel", type=int, default=1, help="workers that share one copy of the model (tp x pp)"
    )
    parser.add_argument(
        "--state-bytes", type=float, default=12.0, help="of each parameter: main copy and moments (Adam in fp32: 12)"
    )
    parser.add_argument("--replicas", type=int, default=1, help="nodes that keep a copy of each snapshot")
    parser.add_argument(
        "--fault-domain",
        action="append",
        default=[],
        metavar="LABEL[*N]",
        help="of the nodes in order, again and again; several with commas between: rack=a,pdu=1*4",
    )
    parser.add_argument("--checkpoints", action="store_true", help="with durable checkpoints")
    parser.add_argument("--integrity", action="store_true", help="with --integrity-every")
    parser.add_argument("--link-gbit", type=float, default=100.0, help="a node's link, Gbit/s in each direction")
    parser.add_argument("--snapshot-interval", type=int, default=1, metavar="STEPS")
    parser.add_argument("--step-s", type=float, default=0.0, help="length of a step, to set the link's time beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _number(text: str) -> int:
    digits, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1.0)
    try:
        found = int(float(digits) * unit)
    except ValueError:
        found = 0
    if found < 1:
        raise UsageError(f"--parameters {text}: a number, with k, m, b or t behind it if you like")
    return found


def _text(job: Job, found: Budget, step_s: float) -> Iterator[str]:
    yield f"{job.nodes} nodes of {job.width}; a slot has {_gib(job.shared_nbytes)} that peers have too, {_gib(job.unique_nbytes)} alone"
    yield f"host memory of a node   snapshots {_gib(found.snapshot_nbytes)}, replicas of others {_gib(found.replica_nbytes)}"
    share = f" ({found.link_s_per_step / step_s:.0%} of {step_s:g} s)" if step_s else ""
    yield f"link, each direction    {found.link_s:.3g} s for a snapshot, {found.link_s_per_step:.3g} s a step{share}"
    yield f"a replaced node         gets its state in {found.restore_s:.3g} s at full speed of the link"
    if found.replicas < job.replicas:
        yield f"replicas                {found.replicas}, not {job.replicas}: there are no more other nodes"
    for loss in found.losses:
        why = "" if loss.survivable else f": not {' or '.join(' with '.join(nodes) for nodes in loss.fatal)}"
        yield f"{'survives' if loss.survivable else 'DOES NOT SURVIVE'} the loss of {loss.what}{why}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 100 else f"{nbytes / 1024:.0f} KiB"
