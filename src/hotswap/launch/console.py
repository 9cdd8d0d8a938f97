"""The workers' output on the launcher's console, line by line, as it appears in their log files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OUT, ERR = 1, 2
"""torchrun's numbers for the streams; their sum means both."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Console:
    """Which output is shown; all of it is in files. ``redirects`` and ``tee`` are per local rank, as torchrun means them.

    ``ranks``: only these local ranks, all if None.
    """

    redirects: Mapping[int, int]
    tee: Mapping[int, int]
    ranks: frozenset[int] | None = None

    def shows(self, local_rank: int, stream: int) -> bool:
        """Whether this stream of this local rank belongs on the console."""
        if self.ranks is not None and local_rank not in self.ranks:
            return False
        redirected = self.redirects.get(local_rank, 0) & stream
        return not redirected or bool(self.tee.get(local_rank, 0) & stream)


class Follower:
    """Follows every ``slot*.out`` and ``slot*.err`` of a job's directory, also those that appear later."""

    def __init__(self, directory: Path, console: Console, nproc_per_node: int) -> None:
        """What is there already belongs to an earlier start of the job and is not shown."""
        self._directory = directory
        self._console = console
        self._nproc_per_node = nproc_per_node
        self._read = {path: path.stat().st_size for path in self._paths()}
        self._rest: dict[Path, bytes] = {}

    def look(self) -> None:
        """Print the whole lines that are new."""
        for path in self._paths():
            data = self._rest.pop(path, b"") + self._news(path)
            *lines, rest = data.split(b"\n")
            if rest:
                self._rest[path] = rest
            for line in lines:
                self._print(path, line)

    def close(self) -> None:
        """Print what is left, whole lines or not."""
        self.look()
        for path, rest in self._rest.items():
            self._print(path, rest)
        self._rest.clear()

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._directory.glob("*/gen*/slot*.*") if self._is_shown(path))

    def _is_shown(self, path: Path) -> bool:
        slot = int(path.stem.removeprefix("slot"))
        return self._console.shows(slot % self._nproc_per_node, ERR if path.suffix == ".err" else OUT)

    def _news(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(CHUNK_BYTES)
            self._read[path] = file.tell()
            return data

    def _print(self, path: Path, line: bytes) -> None:
        target = sys.stderr if path.suffix == ".err" else sys.stdout
        print(f"[{path.stem}] {line.decode(errors='replace')}", file=target, flush=True)
