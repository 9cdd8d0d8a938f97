"""One fork server for all jobs of a framework: its modules are imported once, not once per job."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from hotswap.demo.plan import FRAMEWORKS
from hotswap.launch.job import FORK_SERVER, FORK_SERVER_TOKEN, PRELOADED, start_fork_server
from hotswap.launch.processes import Child, end, expect


class ForkServers:
    """Started when first needed, ended by ``close``."""

    def __init__(self, directory: Path) -> None:
        """Their sockets and logs go below *directory*, which is private."""
        self._directory = directory
        self._children: list[Child] = []
        self._known: dict[str, dict[str, str]] = {}

    @contextlib.contextmanager
    def of(self, framework: str) -> Iterator[None]:
        """Jobs that are started meanwhile use the server of *framework*."""
        if framework not in self._known:
            self._known[framework] = self._start(framework)
        os.environ.update(self._known[framework])
        try:
            yield
        finally:
            for name in self._known[framework]:
                os.environ.pop(name, None)

    def _start(self, framework: str) -> dict[str, str]:
        path, log = self._directory / framework / "fork.sock", self._directory / f"{framework}-fork-server.log"
        token = secrets.token_hex(32)
        child = start_fork_server("torch")
        self._children.append(child)
        preload = [*PRELOADED, FRAMEWORKS[framework].module]
        child.tell({"socket": str(path), "token": token, "preload": preload, "log": str(log)})
        expect(child, "ready", log)
        return {FORK_SERVER: str(path), FORK_SERVER_TOKEN: token}

    def close(self) -> None:
        """End them, and what they have started."""
        end(self._children)
