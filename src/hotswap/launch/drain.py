"""``hotswap drain``: let a node leave a running job, with a spare in its place before it goes."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from hotswap.core.commands import Drain, DrainState
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR, PeerUnreachable, UsageError
from hotswap.launch.command import ask, find

AGAIN_S = 0.2
DRAINING = "draining"
EPILOG = """\
A scheduler's notice does the same, on the node itself: SIGUSR1 (or --drain-on of hotswap run) to its hotswap run.

  Slurm        #SBATCH --signal=USR1@120      all processes get it two minutes before the end; workers ignore it
  Kubernetes   lifecycle: preStop: exec: command: [hotswap, drain, LOGDIR, NODE, --wait, "100"]
               with terminationGracePeriodSeconds above that; or hotswap run --drain-on SIGTERM
  spot         kill -USR1 the node's hotswap run from whatever watches the notice

If there is no spare the node stays for --drain-wait-s (hotswap run), writes a durable checkpoint if the job has storage, and goes.
"""


def main(argv: Sequence[str]) -> int:
    """Entry point: 0 if the node leaves (with --wait: has left), 1 if it is still there when the wait is over."""
    parser = argparse.ArgumentParser(
        prog="hotswap drain",
        description="Let a node leave a running job: a spare takes its place at a step boundary, then its agent exits with 0.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("logs", type=Path, help="the job's log directory on any of its hosts, as hotswap run names it")
    parser.add_argument("node", help="its name, or its identity (name#incarnation)")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait so long until it has left")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    order = Drain(node=args.node, reason=f"hotswap drain by user {os.getuid()}")
    answer = _ask(args.logs, order)
    if answer.state != DRAINING:
        raise UsageError(f"there is no node {args.node!r} in this job; there are {', '.join(answer.nodes) or 'none'}")
    left = _wait(args.logs, order, time.monotonic() + args.wait)
    if args.json:
        print(json.dumps({"node": args.node, "left": left}))
    else:
        print(f"{args.node} has left" if left else f"{args.node} leaves as soon as another node has its place")
    return EXIT_OK if left or not args.wait else EXIT_USER_ERROR


def _ask(logs: Path, order: Drain, within_s: float = math.inf) -> DrainState:
    # A node that already leaves is told nothing new by the same order again.
    return asyncio.run(ask(find(logs), order, DrainState, repeatable=True, within_s=within_s))


def _wait(logs: Path, order: Drain, until: float) -> bool:
    """Whether the node, or the whole job, is gone by then."""
    while time.monotonic() < until:
        time.sleep(AGAIN_S)
        try:
            if _ask(logs, order, until - time.monotonic()).state != DRAINING:
                return True
        except PeerUnreachable:
            continue  # A job without a coordinator for a while.
        except UsageError:
            return True  # The job has ended and taken its token with it.
    return False
