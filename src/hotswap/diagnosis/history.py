"""Keeps what is known about nodes from one job to the next: a JSON file, written whole or not at all, bounded in size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hotswap.diagnosis.model import Verdict
from hotswap.diagnosis.policy import Burden, History
from hotswap.errors import UsageError

FILE_BYTES_MAX = 4 << 20
_VERSION = 1


def load(path: Path) -> History:
    """The history in *path*; an empty one if there is no such file. A damaged file is said, never silently forgotten."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{str(path)!r} has more than {FILE_BYTES_MAX} bytes and is no history of nodes")
        data = json.loads(path.read_text(encoding="utf-8"))
        return _decoded(data)
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"cannot read the history of nodes from {str(path)!r}: {error}") from None


def _decoded(data: Any) -> History:
    if data["version"] != _VERSION:
        raise ValueError(f"version {data['version']}, not {_VERSION}")
    burdens = {
        (str(row["node"]), Verdict(row["verdict"])): Burden(faults=float(row["faults"]), time=float(row["time"]))
        for row in data["faults"]
    }
    return History(
        burdens=burdens, quarantined={str(node): float(until) for node, until in data["quarantined"].items()}
    )


def save(history: History, path: Path) -> None:
    """Writes *history*; a reader sees the old file or the new one."""
    data = {
        "version": _VERSION,
        "faults": [
            {"node": node, "verdict": verdict.value, "faults": one.faults, "time": one.time}
            for (node, verdict), one in history.burdens.items()
        ],
        "quarantined": dict(history.quarantined),
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write the history of nodes to {str(path)!r}: {error}") from None
