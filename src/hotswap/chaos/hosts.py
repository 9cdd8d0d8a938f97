"""Launchers on hosts of their own: each in a network namespace, with its own logs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotswap.chaos.network import Network
from hotswap.launch.job import FORK_SERVER, FORK_SERVER_TOKEN
from hotswap.node.process import die_with_parent

COMMAND_S = 150.0
END_S = 20.0
PORT = 29400
"""Of the coordinator; its host has all ports for itself."""


class Hosts:
    """What runs on the hosts of *net*, with everything that it leaves below *directory*, which all of them see."""

    def __init__(self, net: Network, directory: Path) -> None:
        """Nothing is started yet."""
        self.net = net
        self.directory = directory
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start that ``hotswap`` command there as the host's launcher; what it says goes to ``HOST.log``."""
        inherited = dict(os.environ if environment is None else environment)
        # Workers of a fork server are where that is.
        for name in (FORK_SERVER, FORK_SERVER_TOKEN):
            inherited.pop(name, None)
        with (self.directory / f"{host}.log").open("wb") as log:
            self.launchers[host] = subprocess.Popen(
                self._command(host, arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, "OMP_NUM_THREADS": "1"},
                # Ctrl-C reaches this process alone, which then ends the job in order.
                start_new_session=True,
                preexec_fn=_end_with_us,  # noqa: PLW1509 (this program has one thread)
            )

    def run(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Another ``hotswap`` command on that host."""
        return subprocess.run(
            self._command(host, command), capture_output=True, text=True, timeout=COMMAND_S, check=False
        )

    def place(self, host: str, coordinator: str, *, rank: int) -> tuple[str, ...]:
        """Options by which a launcher there finds the others. The one with rank 0 is on the host *coordinator*."""
        endpoint = f"{self.net.addresses[coordinator]}:{PORT}"
        token = token_file(self.directory)
        return ("--node-name", host, "--node-rank", str(rank), "--rdzv-endpoint", endpoint, "--token-file", token)

    def logs(self, host: str) -> Path:
        """The job's log directory there, if the job is called so."""
        return self.directory / host / "job"

    def _command(self, host: str, arguments: Sequence[str]) -> list[str]:
        return self.net.command(host, [sys.executable, "-m", "hotswap.cli", *arguments])

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """Of the coordinators on all hosts, by time, each with the ``host`` that logged it."""
        found: list[Mapping[str, Any]] = []
        for path in self.directory.glob("*/job/events.jsonl"):
            text = path.read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            found += [{**json.loads(line), "host": path.parts[-3]} for line in lines]
        return sorted(found, key=lambda event: float(event["time"]))

    def close(self) -> None:
        """Politely, and then not: no process of the job outlives its launcher."""
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.terminate()
        end = time.monotonic() + END_S
        for launcher in self.launchers.values():
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, end - time.monotonic()))
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


def token_file(directory: Path) -> str:
    """Path of a file with the token of the job below *directory*, made when first asked for."""
    path = directory / "shared-token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return str(path)


def _end_with_us() -> None:
    die_with_parent(signal.SIGTERM)
