"""``hotswap inject``: strike a running job, for drills."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hotswap.core.commands import Inject, InjectState, Outcome
from hotswap.core.drills import DRILLS, Victim
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR, UsageError
from hotswap.launch.command import ANSWER_S, ask, find

WAIT_S = 30.0
DESCRIPTION = """\
Strike a running job, for drills.

The job has to be started with --allow-inject. The order goes to its coordinator, with the job's token, and from
there to the node concerned, on whichever host that is. Only this job's own processes can be struck, and the event
log says that they were.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="hotswap inject",
        description=DESCRIPTION,
        epilog="faults:\n" + "\n".join(f"  {name:14}{drill.what}" for name, drill in DRILLS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("logs", type=Path, help="the job's log directory on any of its hosts, as hotswap run names it")
    made.add_argument("fault", choices=list(DRILLS))
    made.add_argument("--slot", type=int, help="victim, for workers")
    made.add_argument("--node", help="victim, for nodes and agents: its name, or its identity (name#incarnation)")
    made.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help="how long it may take (default %(default)g s)"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: Sequence[str]) -> int:
    """Entry point: 0 once it was done, 2 if it was refused, 1 if it is not known whether it was done."""
    args = parser().parse_args(argv)
    _require_victim(args)
    order = Inject(
        fault=args.fault,
        slot=-1 if args.slot is None else args.slot,
        node=args.node or "",
        # By number: in containers it often has no name.
        reason=f"hotswap inject by user {os.getuid()}",
        within_s=args.wait,
    )
    answer = asyncio.run(ask(find(args.logs), order, InjectState, patience_s=args.wait + ANSWER_S))
    if answer.outcome is Outcome.REFUSED:
        raise UsageError(answer.detail)
    if args.json:
        print(json.dumps({"fault": args.fault, **asdict(answer)}))
    else:
        print(_told(args.fault, answer))
    return EXIT_OK if answer.outcome is Outcome.STRUCK else EXIT_USER_ERROR


def _require_victim(args: argparse.Namespace) -> None:
    victim = DRILLS[args.fault].victim
    if victim is Victim.WORKER and args.slot is None:
        raise UsageError(f"{args.fault} needs --slot")
    if victim in (Victim.NODE, Victim.AGENT) and not args.node:
        raise UsageError(f"{args.fault} needs --node")
    if not 0 < args.wait < math.inf:
        raise UsageError(f"--wait {args.wait:g}: a number of seconds above 0")


def _told(fault: str, answer: InjectState) -> str:
    slot = f"slot {answer.slot} on " if answer.slot >= 0 else ""
    whom = f"{slot}{answer.node or 'the coordinator'}"
    noun = "process" if len(answer.pids) == 1 else "processes"
    pids = f", {noun} {', '.join(map(str, answer.pids))}" if answer.pids else ""
    if answer.outcome is Outcome.UNSURE:
        return f"{whom}{pids}: {answer.detail}; look at the event log before you try again"
    return f"{DRILLS[fault].what}: {whom}{pids}"
