"""The command line of ``hotswap run``: torchrun's own parser, and a verdict on each of its flags."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from hotswap.errors import UsageError
from hotswap.launch import deadlines, domains
from hotswap.launch import shared_flags as shared
from hotswap.launch.console import Console
from hotswap.launch.options import DEFAULT_RESPAWNS, Options
from hotswap.launch.place import PORT, checked_name
from hotswap.node import gpus
from hotswap.node.process import DRAIN_SIGNAL

HONOURED = frozenset(
    {
        *("nnodes", "nproc_per_node", "standalone", "max_restarts", "role", "module", "training_script"),
        *("training_script_args", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "node_rank", "master_addr", "master_port"),
        *("local_addr", "log_dir", "redirects", "tee", "local_ranks_filter", "signals_to_handle", "shutdown_timeout"),
    }
)
"""torchrun's flags that mean here what they mean there."""

NO_EFFECT = {
    "monitor_interval": "the death of a worker is noticed at once",
    "start_method": "workers are forked from a preloaded server (--no-preload starts interpreters)",
    "rdzv_backend": "the coordinator is the rendezvous",
    "event_log_handler": "events are in events.jsonl in the log directory",
    "logs_specs": "logs are kept per node, generation and slot",
    "duplicate_stdout_filters": "filter the files in the log directory instead",
    "duplicate_stderr_filters": "filter the files in the log directory instead",
}
"""torchrun's flags that change nothing here, and why."""

REFUSED = {
    "no_python": "hotswap runs Python scripts and modules: start other programs from a Python script",
    "run_path": "pass the script itself",
    "virtual_local_rank": "read LOCAL_RANK instead",
    "numa_binding": "bind inside the script, or run one agent per NUMA node",
}
"""torchrun's flags that ask for something hotswap does not do, and what to do instead."""

MASTER_PORT = 29500
OVERHEAD_LIMIT = 0.02


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with hotswap's flags added."""
    made = get_args_parser()
    made.prog = "hotswap run"
    made.description = "Run a training script so that lost nodes are replaced while it runs. Takes torchrun's flags."
    made.set_defaults(max_restarts=DEFAULT_RESPAWNS)
    group = made.add_argument_group("hotswap")
    deadlines.add_flags(group)
    group.add_argument(
        "--spare-wait-s", type=float, default=60.0, help="how long a job without a spare waits for a node (s)"
    )
    group.add_argument(
        "--drain-on",
        default="SIGUSR1",
        metavar="SIGNALS",
        help="signals to this command that say that the node has to leave: a spare takes its place first (hotswap drain --help)",
    )
    group.add_argument(
        "--drain-wait-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a node that has to leave stays while there is no spare (default %(default)g s); less than the notice it gets",
    )
    group.add_argument(
        "--spare-positions", type=int, default=1, help="for how many nodes' places a spare keeps built workers"
    )
    group.add_argument(
        "--worker-loss",
        choices=("auto", "respawn", "spare"),
        default="auto",
        help="a lost worker is started again on its node (respawn), or a spare that is built for the node's place takes it and the "
        "node becomes the spare (spare); auto: spare where there are GPUs, on which starting takes seconds",
    )
    group.add_argument(
        "--preload",
        default="torch",
        help="modules to import once for all workers, comma-separated; they must not start threads",
    )
    group.add_argument("--no-preload", action="store_true", help="start a new interpreter for every worker")
    group.add_argument("--checkpoint-dir", default="", help="where durable checkpoints go")
    group.add_argument(
        "--checkpoint-interval", type=int, default=0, metavar="STEPS", help="steps between durable checkpoints; 0: none"
    )
    group.add_argument(
        "--snapshot-interval", type=int, default=1, metavar="STEPS", help="steps between snapshots; wider if need be"
    )
    group.add_argument(
        "--overhead-limit",
        type=float,
        default=OVERHEAD_LIMIT,
        metavar="SHARE",
        help="share of the time that waiting for replicas and copying may cost before snapshots are made further apart; 0: any",
    )
    group.add_argument(
        "--integrity-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps between comparisons of the state that slots share, which find silent corruption; 0: none",
    )
    shared.add_policy_flags(group)
    group.add_argument(
        "--fault-domain",
        default="",
        help="what this node fails together with, one label or several (rack=r7,switch=s2,pdu=p1); by default from "
        "HOTSWAP_FAULT_DOMAIN, Slurm's topology or a file of Kubernetes node labels (HOTSWAP_NODE_LABELS)",
    )
    group.add_argument(
        "--node-history",
        default="",
        metavar="FILE",
        help="faults of nodes over many jobs, on storage that all nodes see; a node in quarantine is not started",
    )
    group.add_argument(
        "--kernel-log",
        default="",
        metavar="FILE",
        help="the kernel's messages, where /dev/kmsg cannot be read (a container); {node} stands for the node's name",
    )
    group.add_argument("--probe", action="store_true", help="check this node's health first (hotswap probe)")
    group.add_argument(
        "--transfer-streams",
        type=int,
        default=0,
        help="connections per large replica; 0: as many as the processors allow, up to 8",
    )
    group.add_argument("--bind-host", default="", help="numeric address to listen at; loopback unless told otherwise")
    group.add_argument("--node-name", default="", help="this node's name; the host's name by default")
    shared.add_inject_flag(group)
    shared.add_token_flag(group)
    group.add_argument(
        "--coordinator",
        default="",
        metavar="HOST:PORT,...",
        help="coordinators that run elsewhere (hotswap coordinator); this command starts none",
    )
    shared.add_store_flags(group)
    group.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    return made


def parse(argv: list[str]) -> Options:
    """Options of a command line. UsageError, with what to do instead, for flags that cannot be honoured."""
    made = parser()
    args = made.parse_args(argv)
    for name, instead in REFUSED.items():
        if _given(made, args, name):
            raise UsageError(f"--{name.replace('_', '-')} is not supported: {instead}")
    nodes_active, nodes_max = _nodes(args.nnodes)
    _require_positive(args)
    token = shared.token_of(args.token_file)
    endpoint = args.rdzv_endpoint or _static_endpoint(made, args)
    width = _width(args.nproc_per_node)
    return Options(
        nodes_active=nodes_active,
        nodes_max=nodes_max,
        nproc_per_node=width,
        entry=(("-m",) if args.module else ()) + (args.training_script, *args.training_script_args),
        standalone=args.standalone or (nodes_max == 1 and not endpoint and not args.coordinator),
        endpoint=endpoint,
        coordinators=shared.addresses_of("--coordinator", args.coordinator, PORT),
        store=shared.store_of(args),
        job_id=checked_name("--rdzv-id", args.rdzv_id) if args.rdzv_id != "none" else "",
        node_rank=args.node_rank if _given(made, args, "node_rank") else None,
        node_name=args.node_name,
        master_port=args.master_port or MASTER_PORT,
        role=args.role,
        log_dir=args.log_dir or "",
        console=None if args.json else _console(args, width),
        respawns_max=args.max_restarts,
        join_s=_join_timeout(args.rdzv_conf),
        stop_s=_stop_timeout(args),
        signals=_signals(getattr(args, "signals_to_handle", None)),
        timing=deadlines.timing_of(args),
        spare_wait_s=args.spare_wait_s,
        spare_first=args.worker_loss == "spare" or (args.worker_loss == "auto" and bool(gpus.visible())),
        drain_on=_drain_signals(args),
        drain_s=args.drain_wait_s,
        preload=None if args.no_preload else tuple(name for name in args.preload.split(",") if name),
        spare_positions=args.spare_positions,
        checkpoint_dir=str(Path(args.checkpoint_dir).resolve()) if args.checkpoint_dir else "",
        checkpoint_interval_steps=_interval(args),
        snapshot_interval_steps=shared.at_least("--snapshot-interval", args.snapshot_interval, 1),
        overhead_limit=shared.at_least("--overhead-limit", args.overhead_limit, 0.0),
        integrity_every_steps=shared.at_least("--integrity-every", args.integrity_every, 0),
        replicas=shared.at_least("--replicas", args.replicas, 1),
        evict_slow=shared.evict_slow(args.evict_slow),
        keep_groups=args.rebuild != "all",
        min_nodes=shared.min_nodes(args.min_nodes, nodes_active, storage=bool(args.checkpoint_dir)),
        fault_domain=args.fault_domain or domains.discover(os.environ),
        node_history=str(Path(args.node_history).resolve()) if args.node_history else "",
        kernel_log=str(Path(args.kernel_log).resolve()) if args.kernel_log else "",
        probe=args.probe,
        allow_inject=args.allow_inject,
        transfer_streams=args.transfer_streams,
        bind_host=args.bind_host or args.local_addr or "",
        token=token,
        token_file=str(Path(args.token_file).resolve()) if args.token_file else "",
        json=args.json,
        notices=_notices(made, args, width),
    )


def _given(made: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> bool:
    """On the command line, or in the environment as torchrun reads it (PET_...)."""
    in_environment = f"PET_{name.upper()}" in os.environ
    return hasattr(args, name) and (in_environment or getattr(args, name) != made.get_default(name))


def _notices(made: argparse.ArgumentParser, args: argparse.Namespace, width: int) -> tuple[str, ...]:
    found = [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in NO_EFFECT.items()
        if _given(made, args, name)
    ]
    unused = sorted(_conf(args.rdzv_conf).keys() - {"join_timeout"})
    if unused:
        found.append(f"--rdzv-conf {', '.join(unused)} has no effect: only join_timeout concerns the coordinator")
    if width > 1 and "OMP_NUM_THREADS" not in os.environ:
        found.append("OMP_NUM_THREADS is not set: each worker computes on one CPU thread")
    return tuple(found)


def _nodes(text: str) -> tuple[int, int]:
    try:
        active, most = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes {text}: say N, or N:M for N nodes that train and M-N spares") from None
    if not 1 <= active <= most:
        raise UsageError(f"--nnodes {text}: at least one node has to train, and M in N:M counts the spares too")
    return active, most


def _width(text: str) -> int:
    try:
        width: int = determine_local_world_size(text)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {text}: {error}") from None
    if width < 1:
        raise UsageError(f"--nproc-per-node {text}: a node has at least one worker")
    return width


def _require_positive(args: argparse.Namespace) -> None:
    # Written so that NaN fails too.
    for name, least in (
        ("spare_positions", 0),
        ("max_restarts", 0),
        ("spare_wait_s", 0),
        ("drain_wait_s", 0),
        ("transfer_streams", 0),
    ):
        if not getattr(args, name) >= least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be {least} or more")


def _static_endpoint(made: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """``--master-addr`` and ``--master-port``, torchrun's older way to name the meeting place."""
    if not _given(made, args, "master_addr"):
        return ""
    host = f"[{args.master_addr}]" if ":" in args.master_addr else args.master_addr
    # The port itself is left to the script, which finds it in MASTER_PORT.
    return f"{host}:{(args.master_port or MASTER_PORT) + 1}"


def _console(args: argparse.Namespace, width: int) -> Console:
    ranks = None
    try:
        if args.local_ranks_filter:
            ranks = frozenset(int(rank) for rank in args.local_ranks_filter.split(","))
        return Console(redirects=_streams(args.redirects, width), tee=_streams(args.tee, width), ranks=ranks)
    except ValueError as error:
        raise UsageError(f"--redirects, --tee or --local-ranks-filter: {error}") from None


def _streams(text: str, width: int) -> Mapping[int, int]:
    """torchrun's ``3`` or ``0:1,1:3`` (1: standard output, 2: standard error) for each local rank."""
    value = Std.from_str(str(text))
    if isinstance(value, Std):
        return {rank: int(value) for rank in range(width)}
    return {rank: int(stream) for rank, stream in value.items()}


def _signals(text: str | None, flag: str = "--signals-to-handle") -> tuple[signal.Signals, ...]:
    names = [name.strip().upper() for name in (text or "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",") if name.strip()]
    try:
        return tuple(signal.Signals[name] for name in names)
    except KeyError as error:
        raise UsageError(f"{flag}: there is no signal {error}") from None


def _drain_signals(args: argparse.Namespace) -> tuple[signal.Signals, ...]:
    found = _signals(args.drain_on, "--drain-on")
    if args.standalone and any(number is not DRAIN_SIGNAL for number in found):
        raise UsageError(
            "--drain-on: all nodes of a stand-alone job are on this machine; use hotswap drain for one of them"
        )
    return found


def _stop_timeout(args: argparse.Namespace) -> float | None:
    value = getattr(args, "shutdown_timeout", None)
    return None if value is None else float(value)


def _interval(args: argparse.Namespace) -> int:
    if bool(args.checkpoint_dir) != (args.checkpoint_interval > 0):
        raise UsageError("durable checkpoints need both --checkpoint-dir and --checkpoint-interval STEPS")
    interval: int = args.checkpoint_interval
    return interval


def _conf(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split(",") if "=" in item)


def _join_timeout(conf: str) -> float:
    """``--rdzv-conf join_timeout=...``; its other keys tune torchrun's rendezvous, which is not used."""
    text = _conf(conf).get("join_timeout", "600")
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--rdzv-conf join_timeout={text} is not a number of seconds") from None


def report(notices: tuple[str, ...]) -> None:
    """Say which flags change nothing."""
    for notice in notices:
        print(f"hotswap: {notice}", file=sys.stderr)
