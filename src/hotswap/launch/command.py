"""How a command finds the coordinators of a running job, and is answered by the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotswap.core import messages as m
from hotswap.core.leader_search import Address, LeaderSearch
from hotswap.errors import AuthError, HotswapError, PeerUnreachable, ProtocolError, UsageError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

FILE = "job.json"
"""In a job's log directory: where its coordinators are."""
ANSWER_S = 5.0
"""How long a coordinator may take for what it need not wait for."""
TRY_S = 2.0
"""How long one that may be gone is waited for before the next one is asked."""
PAUSE_S = 0.1
A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A job's coordinators, of which one leads. ``takeover_s``: how long it may take until another one does."""

    coordinators: tuple[Address, ...]
    token: str
    takeover_s: float


def describe(coordinators: Sequence[Address], *, takeover_s: float, token_file: str) -> dict[str, Any]:
    """What ``find`` reads: never the token, only where it is."""
    return {"coordinators": [list(each) for each in coordinators], "takeover_s": takeover_s, "token_file": token_file}


def find(logs: Path) -> Target:
    """The coordinators of the job with this log directory, as its launcher describes them. UsageError if there are none."""
    try:
        described = json.loads((logs / FILE).read_text())
        coordinators = tuple((str(host), int(port)) for host, port in described["coordinators"])
        token = Path(described["token_file"]).read_text().strip()
        return Target(coordinators=coordinators, token=token, takeover_s=float(described["takeover_s"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{logs} is not the log directory of a running job, or it is somebody else's: {error}"
        ) from None


async def ask(
    target: Target,
    command: Any,
    answer: type[A],
    *,
    patience_s: float = ANSWER_S,
    repeatable: bool = False,
    within_s: float = math.inf,
) -> A:
    """Tell the coordinator that leads, whoever that is, and return what it answers.

    PeerUnreachable or AuthError if none is found for as long as it may take until one leads, *within_s* at most. PeerUnreachable as well
    if the one that was told does not answer within *patience_s*: another one is told then only if the command is *repeatable*.
    ProtocolError if something else than an *answer* is said.
    """
    search, tried = LeaderSearch(target.coordinators), dict[Address, HotswapError]()
    until = time.monotonic() + min(within_s, target.takeover_s + TRY_S * len(target.coordinators))
    while time.monotonic() < until:
        address = search.next()
        try:
            said = await _exchange(address, target.token, command, patience_s)
        except _Unanswered as error:
            if not repeatable:
                raise
            tried[address] = error
        except (PeerUnreachable, AuthError) as error:
            tried[address] = error
            if all(isinstance(tried.get(each), AuthError) for each in target.coordinators):
                raise
        else:
            if isinstance(said, answer):
                return said
            if not isinstance(said, m.Follow):
                raise ProtocolError(f"the coordinator answered with {type(said).__name__}")
            search.follow(said)
            tried[address] = _not_leading(address, said)
        await asyncio.sleep(PAUSE_S)
    raise PeerUnreachable(
        f"no coordinator of this job leads ({'; '.join(map(str, tried.values()))}). Training goes on without one. "
        "See that one of them runs and is reached from here, and its store as well, then try again"
    )


class _Unanswered(PeerUnreachable):
    """It may have obeyed."""


def _not_leading(address: Address, said: m.Follow) -> PeerUnreachable:
    if said.host:
        return PeerUnreachable(f"{address[0]}:{address[1]} does not lead and says that {said.host}:{said.port} does")
    return PeerUnreachable(f"{address[0]}:{address[1]} cannot decide now and knows of nobody who can")


async def _exchange(address: Address, token: str, command: Any, patience_s: float) -> object:
    host, port = address
    link: AsyncLink[Any] = await open_link(host, port, control_codec(), token, TRY_S)
    try:
        link.send(command)
        said: object = await asyncio.wait_for(link.receive(), patience_s)
        # It hangs up when all that it said is done.
        with contextlib.suppress(HotswapError, asyncio.TimeoutError):
            await asyncio.wait_for(link.receive(), ANSWER_S)
        return said
    except asyncio.TimeoutError:
        raise _Unanswered(_untold(f"did not answer within {patience_s:g} s", host, port)) from None
    except PeerUnreachable as error:
        raise _Unanswered(_untold(f"was lost before it answered ({error})", host, port)) from None
    finally:
        link.close()


def _untold(what: str, host: str, port: int) -> str:
    return f"{host}:{port} was told, and {what}: it may have obeyed, so look at the event log before you try again"
