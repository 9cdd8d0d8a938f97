"""The kernel's own messages since an agent has started: what it killed, and which device failed.

Each read of ``/dev/kmsg`` gives one record, ``priority,sequence,microseconds since boot,flags;text`` and continuation lines
(https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg). Where it cannot be read, which often takes privileges, there is
no such evidence.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

KMSG = Path("/dev/kmsg")
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 5000
"""Read at once; a kernel that complains faster than that has said what it has to say."""


class KernelLog:
    """Reads on from where it stands."""

    def __init__(self, path: Path = KMSG) -> None:
        """Skips what is there already."""
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> list[tuple[float, str]]:
        """(seconds since the epoch, text) of every record since the last time."""
        booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        return [record for raw in self._records() if (record := _parsed(raw, booted)) is not None]

    def _records(self) -> Iterator[bytes]:
        for _ in range(RECORDS_MAX if self._fd is not None else 0):
            assert self._fd is not None
            try:
                record = os.read(self._fd, RECORD_BYTES_MAX)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read gives the oldest that is left
            except OSError:
                return
            if not record:
                return
            yield record

    def close(self) -> None:
        """Read no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _parsed(record: bytes, booted: float) -> tuple[float, str] | None:
    head, found, text = record.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not fields[2].isdigit():
        return None
    return booted + int(fields[2]) / 1e6, text.partition("\n")[0]
