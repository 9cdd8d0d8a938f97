"""The kernel's own messages since an agent has started: what it killed, and which device failed.

Each read of ``/dev/kmsg`` gives one record, ``priority,sequence,microseconds since boot,flags;text`` and continuation lines
(https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg). Where it cannot be read, which often takes privileges, there is
no such evidence. A container may be given the host's log as a file instead, one message a line.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

KMSG = Path("/dev/kmsg")
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 5000
"""Read at once; a kernel that complains faster than that has said what it has to say."""
FILE_BYTES_MAX = 1 << 20
"""The same, of a file."""


class KernelLog:
    """Reads on from where it stands."""

    def __init__(self, path: Path = KMSG) -> None:
        """Skips what is there already."""
        self._path = path
        self._fd: int | None = None
        self._rest = b""
        self._closed = False
        self._open(os.SEEK_END)

    def _open(self, whence: int) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, whence)

    def read(self) -> list[tuple[float, str]]:
        """(seconds since the epoch, text) of every record since the last time; of a file's lines without a time, now."""
        if self._fd is None and not self._closed:
            self._open(os.SEEK_SET)  # A file that was not there has been begun since.
        if self._fd is None:
            return []
        booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        if stat.S_ISREG(os.fstat(self._fd).st_mode):
            lines = ((line, _parsed(line, booted)) for line in self._lines(self._fd))
            return [record or (time.time(), line.decode("utf-8", "replace")) for line, record in lines]
        return [record for raw in self._records() if (record := _parsed(raw, booted)) is not None]

    def _lines(self, fd: int) -> list[bytes]:
        """Whole lines that were appended to a file; where it was cut short (rotated by copying), from its beginning."""
        if os.fstat(fd).st_size < os.lseek(fd, 0, os.SEEK_CUR):
            os.lseek(fd, 0, os.SEEK_SET)
        *lines, self._rest = (self._rest + os.read(fd, FILE_BYTES_MAX)).split(b"\n")
        self._rest = self._rest[-RECORD_BYTES_MAX:]
        return [line for line in lines if line]

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
        self._closed = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _parsed(record: bytes, booted: float) -> tuple[float, str] | None:
    head, found, text = record.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not fields[2].isdigit():
        return None
    return booted + int(fields[2]) / 1e6, text.partition("\n")[0]
