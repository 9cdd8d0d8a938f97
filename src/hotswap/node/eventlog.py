"""The job's event log: one JSON object a line. Writing it never stops the job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hotswap.node.process import append_privately

log = logging.getLogger("hotswap.events")


class EventLog:
    """Appends to a file; a full disk or a missing folder costs the log, not the training."""

    def __init__(self, path: Path, *, go_on: bool) -> None:
        """Open *path*, as far as that is possible. What an earlier job has left there is put aside unless told to *go_on*."""
        self._path = path
        self._file: BinaryIO | None = None
        try:
            if not go_on and path.exists() and path.stat().st_size:
                path.rename(_free_name(path))
            self._file = append_privately(path)
            self._end_line()
        except OSError as error:
            log.warning("there will be no event log: %s", error)

    def read(self) -> Iterator[dict[str, Any]]:
        """What is in the log. A line that a crash has cut off, or that is no event, is passed over."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record

    def _end_line(self) -> None:
        """A crash may have cut the last line off."""
        assert self._file is not None
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                os.write(self._file.fileno(), b"\n")

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one event, in one write, so that readers see whole lines."""
        log.info("%s %s", event, dict(fields))
        if self._file is None:
            return
        line = json.dumps({"time": time.time(), "event": event, **fields}).encode() + b"\n"
        try:
            # Past the buffer, which would keep what a full disk refuses.
            os.write(self._file.fileno(), line)
        except OSError as error:
            log.warning("event %s is not in the log: %s", event, error)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free
