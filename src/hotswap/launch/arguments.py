"""The command line of ``hotswap run``: torchrun's own parser, and a verdict on each of its flags."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from hotswap.errors import UsageError
from hotswap.wire.auth import TOKEN_BYTES_MIN

NO_EFFECT = {
    "monitor_interval": "the death of a worker is noticed at once",
    "start_method": "workers are forked from a preloaded server (--no-preload starts interpreters)",
    "rdzv_backend": "the coordinator is the rendezvous",
    "event_log_handler": "events are in events.jsonl",
    "logs_specs": "logs are kept per node, generation and slot",
    "tee": "output always goes to files, and to the console unless --redirects 3",
}
"""torchrun's flags that change nothing here, and why."""

REFUSED = {
    "no_python": "hotswap runs Python scripts and modules: start other programs from a Python script",
    "run_path": "pass the script itself",
    "virtual_local_rank": "read LOCAL_RANK instead",
    "numa_binding": "bind inside the script, or run one agent per NUMA node",
}
"""torchrun's flags that ask for something hotswap does not do, and what to do instead."""

DEFAULT_RESPAWNS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. ``token`` is empty in a stand-alone job: the launcher makes one."""

    nodes_active: int
    nodes_max: int
    nproc_per_node: int
    entry: tuple[str, ...]
    standalone: bool
    endpoint: str = ""
    job_id: str = ""
    node_rank: int | None = None
    node_name: str = ""
    master_port: int = 29500
    log_dir: str = ""
    quiet: bool = False
    respawns_max: int = DEFAULT_RESPAWNS
    join_s: float = 600.0
    detection_budget_s: float = 5.0
    spare_wait_s: float = 60.0
    preload: tuple[str, ...] = ("torch",)
    spare_positions: int = 1
    checkpoint_dir: str = ""
    checkpoint_interval_steps: int = 0
    fault_domain: str = ""
    transfer_streams: int = 2
    bind_host: str = ""
    token: str = field(default="", repr=False)
    json: bool = False
    notices: tuple[str, ...] = ()


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with hotswap's flags added."""
    made = get_args_parser()
    made.prog = "hotswap run"
    made.description = "Run a training script so that lost nodes are replaced while it runs. Takes torchrun's flags."
    made.set_defaults(max_restarts=DEFAULT_RESPAWNS)
    group = made.add_argument_group("hotswap")
    group.add_argument(
        "--detection-budget-s",
        type=float,
        default=5.0,
        help="longest silence of a live node (s); all other deadlines follow from it",
    )
    group.add_argument(
        "--spare-wait-s", type=float, default=60.0, help="how long a job without a spare waits for a node (s)"
    )
    group.add_argument(
        "--spare-positions", type=int, default=1, help="for how many nodes' places a spare keeps built workers"
    )
    group.add_argument("--preload", default="torch", help="modules to import once, comma-separated")
    group.add_argument("--no-preload", action="store_true", help="start a new interpreter for every worker")
    group.add_argument("--checkpoint-dir", default="", help="where durable checkpoints go")
    group.add_argument(
        "--checkpoint-interval", type=int, default=0, metavar="STEPS", help="steps between durable checkpoints; 0: none"
    )
    group.add_argument("--fault-domain", default="", help="label of what this node fails together with (rack, switch)")
    group.add_argument("--transfer-streams", type=int, default=2, help="connections per large replica")
    group.add_argument("--bind-host", default="", help="numeric address to listen at; loopback unless told otherwise")
    group.add_argument("--node-name", default="", help="this node's name; the host's name by default")
    group.add_argument(
        "--token-file", default="", help="file with the job's token, the same on every node (or set HOTSWAP_TOKEN)"
    )
    group.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    return made


def parse(argv: list[str]) -> Options:
    """Options of a command line. UsageError, with what to do instead, for flags that cannot be honoured."""
    made = parser()
    args = made.parse_args(argv)
    for name, instead in REFUSED.items():
        if _given(made, args, name):
            raise UsageError(f"--{name.replace('_', '-')} is not supported: {instead}")
    notices = [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in NO_EFFECT.items()
        if _given(made, args, name)
    ]
    nodes_active, nodes_max = parse_min_max_nnodes(args.nnodes)
    _require_positive(args, nodes_active)
    return Options(
        nodes_active=nodes_active,
        nodes_max=nodes_max,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        entry=(("-m",) if args.module else ()) + (args.training_script, *args.training_script_args),
        standalone=args.standalone or (nodes_max == 1 and not args.rdzv_endpoint),
        endpoint=args.rdzv_endpoint or _static_endpoint(made, args),
        job_id=args.rdzv_id if args.rdzv_id != "none" else "",
        node_rank=args.node_rank if _given(made, args, "node_rank") else None,
        node_name=args.node_name,
        master_port=args.master_port,
        log_dir=args.log_dir or "",
        quiet=str(args.redirects) == "3",
        respawns_max=args.max_restarts,
        join_s=_join_timeout(args.rdzv_conf),
        detection_budget_s=args.detection_budget_s,
        spare_wait_s=args.spare_wait_s,
        preload=() if args.no_preload else tuple(name for name in args.preload.split(",") if name),
        spare_positions=args.spare_positions,
        checkpoint_dir=str(Path(args.checkpoint_dir).resolve()) if args.checkpoint_dir else "",
        checkpoint_interval_steps=_interval(args),
        fault_domain=args.fault_domain,
        transfer_streams=args.transfer_streams,
        bind_host=args.bind_host,
        token=_token(args.token_file),
        json=args.json,
        notices=tuple(notices),
    )


def _given(made: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> bool:
    return hasattr(args, name) and getattr(args, name) != made.get_default(name)


def _require_positive(args: argparse.Namespace, nodes_active: int) -> None:
    if nodes_active < 1:
        raise UsageError(f"--nnodes {args.nnodes}: at least one node has to train")
    if args.detection_budget_s < 0.5:
        raise UsageError(
            f"--detection-budget-s {args.detection_budget_s:g}: under 0.5 s every pause of a scheduler costs a node"
        )
    if args.spare_positions < 0 or args.transfer_streams < 1 or args.max_restarts < 0 or args.spare_wait_s < 0:
        raise UsageError(
            "--spare-positions, --max-restarts and --spare-wait-s are 0 or more, --transfer-streams 1 or more"
        )


def _static_endpoint(made: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """``--master-addr`` and ``--master-port``, torchrun's older way to name the meeting place."""
    if not _given(made, args, "master_addr"):
        return ""
    return f"{args.master_addr}:{args.master_port + 1}"


def _interval(args: argparse.Namespace) -> int:
    if bool(args.checkpoint_dir) != (args.checkpoint_interval > 0):
        raise UsageError("durable checkpoints need both --checkpoint-dir and --checkpoint-interval STEPS")
    interval: int = args.checkpoint_interval
    return interval


def _join_timeout(conf: str) -> float:
    """``--rdzv-conf join_timeout=...``; its other keys tune torchrun's rendezvous, which is not used."""
    pairs = dict(item.split("=", 1) for item in conf.split(",") if "=" in item)
    try:
        return float(pairs.get("join_timeout", 600))
    except ValueError:
        raise UsageError(f"--rdzv-conf join_timeout={pairs['join_timeout']} is not a number of seconds") from None


def _token(path: str) -> str:
    if not path:
        return os.environ.get("HOTSWAP_TOKEN", "")
    try:
        mode = os.stat(path).st_mode & 0o077
        token = Path(path).read_text().strip()
    except OSError as error:
        raise UsageError(f"--token-file: {error}") from None
    if mode:
        raise UsageError(f"--token-file {path} can be read by others: chmod 600 it")
    if len(token.encode()) < TOKEN_BYTES_MIN:
        raise UsageError(f"--token-file {path}: the token has fewer than {TOKEN_BYTES_MIN} bytes")
    return token


def report(notices: tuple[str, ...]) -> None:
    """Say which flags change nothing."""
    for notice in notices:
        print(f"hotswap: {notice}", file=sys.stderr)
