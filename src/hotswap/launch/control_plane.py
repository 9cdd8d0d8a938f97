"""``hotswap coordinator`` and ``hotswap store``: the control plane on hosts of its own. Neither imports torch."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from hotswap.config import CoordinatorConfig
from hotswap.errors import EXIT_REQUEUE, UsageError
from hotswap.launch import deadlines, place
from hotswap.launch import shared_flags as shared
from hotswap.launch.options import DEFAULT_RESPAWNS
from hotswap.node.accept import open_listener
from hotswap.node.coordinator import run_coordinator
from hotswap.node.process import make_private_directory, set_up_logging
from hotswap.store.server import StoreServer

STORE_PORT = "29399"


def coordinator_parser() -> argparse.ArgumentParser:
    """Flags as those of ``hotswap run``, as far as they concern the coordinator."""
    made = argparse.ArgumentParser(
        prog="hotswap coordinator",
        description="Decide for a job whose nodes are started with 'hotswap run --coordinator'. With --store there may be several of "
        "them: one leads, and another takes over within the lease when it is gone.",
    )
    made.add_argument("--nnodes", required=True, metavar="N[:M]", help="as for hotswap run")
    made.add_argument("--nproc-per-node", type=int, required=True, metavar="N", help="workers of each node")
    made.add_argument("--rdzv-id", required=True, help="the job's name; another one for each run of it")
    made.add_argument("--listen", default=f"0.0.0.0:{place.PORT}", metavar="HOST:PORT", help="default: %(default)s")
    made.add_argument("--advertise", default="", metavar="HOST", help="where agents reach this host")
    made.add_argument(
        "--go-on",
        action="store_true",
        help="it was started again in the same run of the job: go on with the event log that is there",
    )
    made.add_argument("--log-dir", required=True, help="the event log goes to JOB/events.jsonl in it")
    shared.add_token_flag(made)
    shared.add_store_flags(made)
    deadlines.add_flags(made)
    made.add_argument(
        "--spare-wait-s", type=float, default=60.0, help="how long a job without a spare waits for a node (s)"
    )
    shared.add_policy_flags(made)
    made.add_argument(
        "--checkpoint-dir", default="", help="as for hotswap run; only whether the nodes have one matters here"
    )
    made.add_argument("--join-timeout-s", type=float, default=600.0, help="how long the first nodes are waited for (s)")
    made.add_argument(
        "--max-restarts", type=int, default=DEFAULT_RESPAWNS, help="respawns of a worker without progress"
    )
    made.add_argument(
        "--worker-loss",
        choices=("respawn", "spare"),
        default="respawn",
        help="as for hotswap run, which prefers 'spare' on GPUs",
    )
    made.add_argument("--node-history", default="", metavar="FILE", help="as for hotswap run")
    shared.add_inject_flag(made)
    return made


def coordinator(argv: list[str]) -> int:
    """``hotswap coordinator``; the job's exit code."""
    args = coordinator_parser().parse_args(argv)
    active, most = _nodes(args.nnodes)
    host, port = place.resolve("--listen", args.listen)
    directory = Path(args.log_dir).resolve() / place.checked_name("--rdzv-id", args.rdzv_id)
    make_private_directory(directory)
    config = CoordinatorConfig(
        job_id=args.rdzv_id,
        token=shared.required_token(args.token_file),
        restarted=args.go_on,
        host=host,
        port=port,
        advertise_host=_advertised(args, host),
        nodes_active=active,
        nodes_max=most,
        nproc_per_node=args.nproc_per_node,
        timing=deadlines.timing_of(args),
        respawns_max=args.max_restarts,
        spare_wait_s=args.spare_wait_s,
        spare_first=args.worker_loss == "spare",
        replicas=shared.at_least("--replicas", args.replicas, 1),
        evict_slow=shared.evict_slow(args.evict_slow),
        keep_groups=args.rebuild != "all",
        nodes_min=shared.min_nodes(args.min_nodes, active, storage=bool(args.checkpoint_dir)),
        checkpoint_dir=args.checkpoint_dir or None,
        join_s=args.join_timeout_s,
        events_path=str(directory / "events.jsonl"),
        node_history=str(Path(args.node_history).resolve()) if args.node_history else None,
        allow_inject=args.allow_inject,
        store=shared.store_of(args),
    )
    set_up_logging()
    for name in shared.SECRETS:
        os.environ.pop(name, None)
    try:
        code = asyncio.run(run_coordinator(config))
    except OSError as error:
        print(f"hotswap: cannot serve on {args.listen}: {error}", file=sys.stderr)
        return EXIT_REQUEUE
    return 128 + signal.SIGTERM if code is None else code


def _advertised(args: argparse.Namespace, host: str) -> str:
    if args.advertise:
        return place.resolve("--advertise", f"{args.advertise}:0")[0]
    if not place.is_any(host):
        return host
    if args.store:
        raise UsageError("--listen at all addresses needs --advertise HOST: the other coordinators send agents there")
    return place.LOOPBACK


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        active, most_nodes = int(least), int(most or least)
    except ValueError:
        raise UsageError(f"--nnodes {text}: say N, or N:M for N nodes that train and M-N spares") from None
    if not 1 <= active <= most_nodes:
        raise UsageError(f"--nnodes {text}: at least one node has to train, and M in N:M counts the spares too")
    return active, most_nodes


def store(argv: list[str]) -> int:
    """``hotswap store``: serve until a signal ends it."""
    made = argparse.ArgumentParser(
        prog="hotswap store",
        description="A store for the coordinators of a job, where there is no etcd. Run it on a host that does not train; "
        "while it is gone training goes on, but nothing is decided.",
    )
    made.add_argument("--listen", default=f"0.0.0.0:{STORE_PORT}", metavar="HOST:PORT", help="default: %(default)s")
    made.add_argument("--file", required=True, help="what it knows; a restart goes on from there")
    shared.add_token_flag(made)
    args = made.parse_args(argv)
    host, port = place.resolve("--listen", args.listen)
    path = Path(args.file).resolve()
    make_private_directory(path.parent)
    set_up_logging()
    server = StoreServer(shared.required_token(args.token_file), path)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(server, host, port))
    except OSError as error:
        print(f"hotswap: cannot serve on {args.listen}: {error}", file=sys.stderr)
        return EXIT_REQUEUE
    return 0


async def _serve(server: StoreServer, host: str, port: int) -> None:
    serving = asyncio.current_task()
    assert serving is not None, "asyncio runs this in a task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with open_listener(host, port) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await server.serve(listener)
