"""Which GPUs of one machine belong to which slots, when the machine is made into several nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def visible(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Asks no driver."""
    if VISIBLE in environment:
        return tuple(name.strip() for name in environment[VISIBLE].split(",") if name.strip())
    found = (_DEVICE_FILE.fullmatch(path.name) for path in devices.iterdir())
    return tuple(sorted((match[1] for match in found if match), key=int))


def share(gpus: Sequence[str], position: int, width: int) -> dict[str, str]:
    """What workers at *position* have to be told about *gpus*, the GPUs of the whole machine; *width* workers to a node.

    GPUs belong to positions and not to nodes: a spare of the same machine takes over those of the node it replaces,
    and two slots never share one as long as there are enough for all slots.
    """
    if not gpus:
        return {}
    chosen = [gpus[(position * width + worker) % len(gpus)] for worker in range(width)]
    return {VISIBLE: ",".join(dict.fromkeys(chosen))}
