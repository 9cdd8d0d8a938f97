"""``hotswap drain``: let a node leave a running job, with a spare in its place before it goes."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotswap.core import messages as m
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR, PeerUnreachable, ProtocolError, UsageError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link

ANSWER_S = 5.0
AGAIN_S = 0.2
REDIRECTIONS_MAX = 3
DRAINING = "draining"
EPILOG = """\
A scheduler's notice does the same, on the node itself: SIGUSR1 (or --drain-on of hotswap run) to its hotswap run.

  Slurm        #SBATCH --signal=USR1@120      all processes get it two minutes before the end; workers ignore it
  Kubernetes   lifecycle: preStop: exec: command: [hotswap, drain, LOGDIR, NODE, --wait, "100"]
               with terminationGracePeriodSeconds above that; or hotswap run --drain-on SIGTERM
  spot         kill -USR1 the node's hotswap run from whatever watches the notice

If there is no spare the node stays for --drain-wait-s (hotswap run), writes a durable checkpoint if the job has storage, and goes.
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A job's coordinator."""

    host: str
    port: int
    token: str


def find(logs: Path) -> Target:
    """The coordinator of the job with this log directory, as its launcher describes it. UsageError if there is none."""
    try:
        described = json.loads((logs / "job.json").read_text())
        token = Path(described["token_file"]).read_text().strip()
        return Target(host=described["host"], port=int(described["port"]), token=token)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{logs} is not the log directory of a running job, or it is somebody else's: {error}"
        ) from None


async def ask(target: Target, node: str, reason: str) -> m.DrainState:
    """Tell the coordinator that leads, whoever that is. PeerUnreachable, or AuthError, if it does not answer."""
    for _ in range(REDIRECTIONS_MAX):
        answer = await _exchange(target, m.Drain(node=node, reason=reason))
        if isinstance(answer, m.DrainState):
            return answer
        if not (isinstance(answer, m.Follow) and answer.host):
            raise ProtocolError(f"the coordinator answered with {type(answer).__name__}")
        target = replace(target, host=answer.host, port=answer.port)
    raise PeerUnreachable("the coordinators of this job do not agree on who leads; try again in a few seconds")


async def _exchange(target: Target, command: m.Drain) -> object:
    link = await open_link(target.host, target.port, control_codec(), target.token, ANSWER_S)
    try:
        link.send(command)
        return await asyncio.wait_for(link.receive(), ANSWER_S)
    except asyncio.TimeoutError:
        raise PeerUnreachable(f"{target.host}:{target.port} did not answer within {ANSWER_S:g} s") from None
    finally:
        link.close()


def main(argv: Sequence[str]) -> int:
    """Entry point: 0 if the node leaves (with --wait: has left), 1 if it is still there when the wait is over."""
    parser = argparse.ArgumentParser(
        prog="hotswap drain",
        description="Let a node leave a running job: a spare takes its place at a step boundary, then its agent exits with 0.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "logs", type=Path, help="the job's log directory on the host of its coordinator, as hotswap run names it"
    )
    parser.add_argument("node", help="its name, or its identity (name#incarnation)")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait so long until it has left")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    reason = f"hotswap drain by {getpass.getuser()}"
    answer = asyncio.run(ask(find(args.logs), args.node, reason))
    if answer.state != DRAINING:
        raise UsageError(f"there is no node {args.node!r} in this job; there are {', '.join(answer.nodes) or 'none'}")
    left = _wait(args.logs, args.node, reason, time.monotonic() + args.wait)
    if args.json:
        print(json.dumps({"node": args.node, "left": left}))
    else:
        print(f"{args.node} has left" if left else f"{args.node} leaves as soon as another node has its place")
    return EXIT_OK if left or not args.wait else EXIT_USER_ERROR


def _wait(logs: Path, node: str, reason: str, until: float) -> bool:
    """Whether the node, or the whole job, is gone by then."""
    while time.monotonic() < until:
        time.sleep(AGAIN_S)
        try:
            # The same question again: a node that already leaves is told nothing new.
            if asyncio.run(ask(find(logs), node, reason)).state != DRAINING:
                return True
        except PeerUnreachable:
            continue  # A coordinator that is started again.
        except UsageError:
            return True  # The job has ended and taken its token with it.
    return False
