"""Whether a node may take part in a job: it is not in quarantine, and nothing speaks against its health."""

from __future__ import annotations

import time
from pathlib import Path

from hotswap.diagnosis.history import load
from hotswap.diagnosis.probes import run_probes
from hotswap.errors import HotswapError


def require_not_quarantined(name: str, history: Path, now: float | None = None) -> None:
    """HotswapError if an earlier job has put this node into quarantine, with what to do about it."""
    until = load(history).quarantined.get(name, 0.0)
    if until > (time.time() if now is None else now):
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))
        raise HotswapError(
            f"node {name} is in quarantine until {day}: an earlier job found it at fault. Look at it, then take its line "
            f"out of {history} to trust it again"
        )


def require_healthy(name: str) -> None:
    """HotswapError if a probe fails; each has a deadline and a process of its own, so that this comes to an end."""
    failed = [f"{result.name}: {result.detail}" for result in run_probes() if not result.ok]
    if failed:
        raise HotswapError(f"node {name} does not take part, for it is not healthy: {'; '.join(failed)}")
