"""How a command finds the coordinator of a running job, and is answered by the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hotswap.core import messages as m
from hotswap.errors import HotswapError, PeerUnreachable, ProtocolError, UsageError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

ANSWER_S = 5.0
"""How long a coordinator may take for what it need not wait for."""
REDIRECTIONS_MAX = 3
A = TypeVar("A")


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


async def ask(target: Target, command: Any, answer: type[A], *, patience_s: float = ANSWER_S) -> A:
    """Tell the coordinator that leads, whoever that is, and return what it answers.

    PeerUnreachable or AuthError if it does not answer within *patience_s*, ProtocolError if it says something else than an *answer*.
    """
    for _ in range(REDIRECTIONS_MAX):
        said = await _exchange(target, command, patience_s)
        if isinstance(said, answer):
            return said
        if not (isinstance(said, m.Follow) and said.host):
            raise ProtocolError(f"the coordinator answered with {type(said).__name__}")
        target = replace(target, host=said.host, port=said.port)
    raise PeerUnreachable("the coordinators of this job do not agree on who leads; try again in a few seconds")


async def _exchange(target: Target, command: Any, patience_s: float) -> object:
    link: AsyncLink[Any] = await open_link(target.host, target.port, control_codec(), target.token, ANSWER_S)
    try:
        link.send(command)
        said: object = await asyncio.wait_for(link.receive(), patience_s)
        # It hangs up when all that it said is done.
        with contextlib.suppress(HotswapError, asyncio.TimeoutError):
            await asyncio.wait_for(link.receive(), ANSWER_S)
        return said
    except asyncio.TimeoutError:
        raise PeerUnreachable(f"{target.host}:{target.port} did not answer within {patience_s:g} s") from None
    finally:
        link.close()
