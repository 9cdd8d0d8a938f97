"""What ``nvidia-smi`` says about the GPUs of this node. Asking it touches no GPU's memory and starts nothing on one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMI_S = 10.0
IDLE_BYTES_MAX = 1 << 30
"""What driver and display may hold on a GPU that nobody uses."""
IDLE_PERCENT_MAX = 5


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``users``: processes that compute on it, as far as this namespace sees them."""

    index: int
    uuid: str
    used_bytes: int
    busy_percent: int
    users: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether nobody uses it. A container does not see the processes of others, but what they take."""
        return not self.users and self.used_bytes <= IDLE_BYTES_MAX and self.busy_percent <= IDLE_PERCENT_MAX


def query(fields: Sequence[str], what: str = "gpu") -> list[list[str]] | None:
    """A row of cells for each GPU (or for each of its processes, ``compute-apps``); None where nobody can be asked."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def gpus() -> list[Gpu] | None:
    """All of the node, in the order of their PCI addresses; None where the driver does not answer or there is none."""
    rows = query(("index", "uuid", "memory.used", "utilization.gpu"))
    if rows is None:
        return None
    users: dict[str, list[str]] = {}
    for uuid, pid in query(("gpu_uuid", "pid"), "compute-apps") or ():
        users.setdefault(uuid, []).append(pid)
    return [
        Gpu(
            index=number(index),
            uuid=uuid,
            used_bytes=number(used) << 20,
            busy_percent=number(busy),
            users=tuple(sorted(users.get(uuid, ()))),
        )
        for index, uuid, used, busy in rows
    ]


def visible(found: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that a CUDA program would see here; all where the environment names them in a way not known (MIG)."""
    named = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    chosen = [gpu for gpu in found if str(gpu.index) in named or any(gpu.uuid.startswith(one) for one in named)]
    return chosen or list(found)


def number(cell: str) -> int:
    """0 for what the GPU does not have (``[N/A]``)."""
    return int(cell) if cell.isdigit() else 0
