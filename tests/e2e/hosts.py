"""One job whose launchers are on hosts of their own, each with its own logs, followed by a test."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from e2e_harness import POLL_S, SCRIPTS, Cell, Event, Outcome, planned, read_lines

from hotswap.chaos import hosts
from hotswap.chaos.hosts import token_file
from hotswap.chaos.network import Network, obstacle
from hotswap.demo.records import merge, read_final, read_records, resume_points

DEADLINE_S = 150.0
FIRST = 0.0
OBSTACLE = obstacle(False)
needs_hosts = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)


class Hosts(hosts.Hosts):
    """Launchers of the job of *cell*. Events are those of all coordinators, by time, each with the ``host`` that logged it."""

    def __init__(self, net: Network, directory: Path, cell: Cell) -> None:
        super().__init__(net, directory)
        self.cell = cell
        self._waited_for = FIRST

    def launch(self, host: str, *flags: str) -> None:
        """Start ``hotswap run`` there."""
        cell = self.cell
        nodes = f"{cell.program.nodes}:{cell.program.nodes + cell.spares}"
        command = [
            *("run", "--nnodes", nodes, "--nproc-per-node", str(cell.program.width), "--rdzv-id", "job"),
            *("--node-name", host, "--log-dir", str(self.directory / host), "--token-file", token_file(self.directory)),
            *("--redirects", "3", "--overhead-limit", "0", "--spare-positions", str(cell.program.nodes)),
            *(*cell.run_arguments, *flags),
            *(cell.script or (str(SCRIPTS / cell.program.script),)),
            *(*cell.train.to_arguments(), "--out", str(self.directory)),
        ]
        self.start(host, command)

    def wait_for(self, name: str, after: float | None = None, **fields: object) -> Event:
        """The first event of this kind *after* a time; by default that of the event that was waited for last."""
        began = self._waited_for if after is None else after
        end = time.monotonic() + DEADLINE_S
        while True:
            # Looked at before the events: what is written last is read as well.
            over = all(launcher.poll() is not None for launcher in self.launchers.values()) and bool(self.launchers)
            for event in self.events:
                if event["event"] == name and event["time"] > began and fields.items() <= event.items():
                    self._waited_for = float(event["time"])
                    return event
            if over or time.monotonic() > end:
                raise AssertionError(f"no {name} {fields}\n{self.story()}")
            time.sleep(4 * POLL_S)

    def finish(self, host: str) -> Outcome:
        """Wait until the launcher there has ended; what the job has left is what counts."""
        try:
            code = self.launchers[host].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher on {host} does not end\n{self.story()}") from None
        events = self.events
        return Outcome(
            exit_code=code,
            events=events,
            deaths=read_lines(self.directory / "faults.jsonl"),
            history=merge(read_records(self.directory), resume_points(events), planned(self.cell.train)),
            final=read_final(self.directory),
            console=(self.directory / f"{host}.log").read_text(errors="replace"),
            leftovers=(),
            story=self.story(),
        )

    def story(self) -> str:
        """For a failed assertion."""
        lines = [json.dumps(event)[:300] for event in self.events if event["event"] != "step_committed"]
        for path in [*self.directory.glob("*.log"), *self.directory.glob("*/job/*/agent.log")]:
            lines += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)


def assert_same(outcome: Outcome, reference: Outcome) -> None:
    """The job ended well, with what the undisturbed one computed."""
    assert outcome.exit_code == 0, outcome.story
    assert outcome.history.faults == (), outcome.history.faults
    assert outcome.history.losses == reference.history.losses
    assert outcome.history.sample_ids == reference.history.sample_ids
    assert outcome.final == reference.final
