"""The flags that set a job's deadlines, the same for every command that has them, and the table that follows from them."""

from __future__ import annotations

import argparse

from hotswap.config import Timing
from hotswap.errors import UsageError

AUTO, OFF = "auto", "off"


def add_flags(group: argparse._ActionsContainer) -> None:
    """Add them to a parser or a group of one."""
    group.add_argument(
        "--detection-budget-s",
        type=float,
        default=Timing.detection_budget_s,
        metavar="S",
        help="longest silence of a live node (default %(default)g s); all other deadlines follow from it (hotswap doctor)",
    )
    group.add_argument(
        "--hang-budget-s",
        default=AUTO,
        metavar="S",
        help="how long nobody may advance while somebody is waited for; 'auto' follows the job's own steps, 'off' never acts",
    )
    group.add_argument(
        "--pause-limit-s",
        type=float,
        default=0.0,
        metavar="S",
        help="how long all workers may be busy outside of collectives (evaluation, a checkpoint); 0: no limit, only reported",
    )
    group.add_argument(
        "--collective-timeout-s", type=float, default=None, metavar="S", help="longest wait of a collective"
    )
    group.add_argument(
        "--lease-s",
        type=float,
        default=None,
        metavar="S",
        help="of several coordinators (--store), one that the store has not heard for so long is replaced",
    )


def timing_of(args: argparse.Namespace) -> Timing:
    """What the flags say. UsageError if it cannot work."""
    return Timing(
        detection_budget_s=args.detection_budget_s,
        hang_s=_hang(args.hang_budget_s),
        pause_s=args.pause_limit_s,
        collective_s=args.collective_timeout_s,
        leader_s=args.lease_s,
    )


def _hang(text: str) -> float | None:
    if text in (AUTO, OFF):
        return None if text == AUTO else 0.0
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--hang-budget-s {text}: a number of seconds, {AUTO!r} or {OFF!r}") from None


def as_text(timing: Timing) -> str:
    """The table for people."""
    return "\n".join(f"{seconds:8g} s  {name:17}{meaning}" for name, seconds, meaning in timing.table())
