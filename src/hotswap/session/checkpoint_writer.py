"""Entry point of the process that makes one snapshot durable; started by the agent, which owns the memory."""

from __future__ import annotations

import os

from hotswap.replication.durable import write

SNAPSHOT_FD = "HOTSWAP_SNAPSHOT_FD"


def main(path: str, nbytes: int, shared_nbytes: int, unique_nbytes: int) -> None:
    """Write the snapshot in the memory file whose descriptor is in the environment as the DCP folder *path*."""
    write(int(os.environ[SNAPSHOT_FD]), nbytes, shared_nbytes, unique_nbytes, path)
