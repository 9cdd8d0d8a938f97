"""The workers' output on the launcher's console, line by line, as it appears in their log files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TextIO

POLL_S = 0.1


class Follower:
    """Follows every ``slot*.out`` and ``slot*.err`` below a directory, also those that appear later."""

    def __init__(self, directory: Path) -> None:
        """Nothing is read before ``start``."""
        self._directory = directory
        self._files: dict[Path, tuple[TextIO, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotswap-follow", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Print what is left and end."""
        self._stop.set()
        self._thread.join()
        self._pass()
        for file, rest in self._files.values():
            if rest:
                print(rest)
            file.close()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._pass()

    def _pass(self) -> None:
        for path in sorted(self._directory.glob("*/gen*/slot*.*")):
            if path not in self._files:
                self._files[path] = (path.open(errors="replace"), "")
            file, rest = self._files[path]
            *lines, rest = (rest + file.read()).split("\n")
            self._files[path] = (file, rest)
            target = sys.stderr if path.suffix == ".err" else sys.stdout
            for line in lines:
                print(f"[{path.stem}] {line}", file=target, flush=True)
