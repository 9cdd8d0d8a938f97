"""Coordinators, the store and the nodes on hosts of their own, of which some are cut off or lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_plane import LEASE_S, TWO, Server, coordinator, paced, store, token_file
from e2e_harness import POLL_S, Cell, Event, Outcome, planned
from etcd_cluster import Cluster, require_etcd
from network import Network, can_be_made, network

from hotswap.demo.records import merge, read_final, read_records, resume_points

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.full_matrix,
    pytest.mark.skipif(not can_be_made(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]
Reference = Callable[[Cell], Outcome]
CELL = paced(160)
NODES, KEEPERS = ("a", "b", "c"), ("k0", "k1", "k2")
DEADLINE_S = 150.0


class Site:
    """A launcher on each of ``NODES``. Every host has its own logs; events are those of all coordinators, by time."""

    def __init__(self, net: Network, directory: Path) -> None:
        self.net = net
        self.directory = directory
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.servers: list[Server] = []

    def launch(self, flags: Sequence[str]) -> None:
        for host in NODES:
            command = [
                *(sys.executable, "-m", "hotswap.cli", "run", "--nnodes", "2:3", "--nproc-per-node", "1"),
                *("--rdzv-id", "job", "--node-name", host, "--log-dir", str(self.directory / host)),
                *("--token-file", token_file(self.directory), "--redirects", "3", "--overhead-limit", "0"),
                *("--spare-positions", "2", "--lease-s", str(LEASE_S), "--detection-budget-s", "8", *flags),
                *(*CELL.script, *CELL.train.to_arguments(), "--out", str(self.directory)),
            ]
            with (self.directory / f"{host}.log").open("wb") as log:
                self.launchers[host] = subprocess.Popen(
                    self.net.command(host, command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )

    @property
    def events(self) -> list[Event]:
        found: list[Event] = []
        for path in self.directory.glob("*/job/events.jsonl"):
            text = path.read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            found += [{**json.loads(line), "host": path.parts[-3]} for line in lines]
        return sorted(found, key=lambda event: float(event["time"]))

    def wait_for(self, name: str, after: float = 0.0, **fields: object) -> Event:
        """The first event of this kind after a time."""
        end = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events:
                if event["event"] == name and event["time"] > after and fields.items() <= event.items():
                    return event
            assert time.monotonic() < end, f"no {name} {fields}\n{self.story()}"
            time.sleep(10 * POLL_S)

    def finish(self, host: str, reference: Outcome) -> list[Event]:
        """The job ends on its own, with what it would have computed anyway."""
        assert self.launchers[host].wait(DEADLINE_S) == 0, self.story()
        events = self.events
        history = merge(read_records(self.directory), resume_points(events), planned(CELL.train))
        assert history.faults == (), history.faults
        assert history.losses == reference.history.losses
        assert read_final(self.directory) == reference.final
        announced = [e for e in events if e["event"] == "recovery_started"]
        memberships = {(e["generation"], tuple(e["places"])) for e in announced}
        assert len(memberships) == len({generation for generation, _ in memberships}), memberships
        return events

    def story(self) -> str:
        lines = [json.dumps(event)[:250] for event in self.events if event["event"] != "step_committed"]
        for path in [*self.directory.glob("*.log"), *self.directory.glob("*/job/*/agent.log")]:
            lines += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def close(self) -> None:
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.terminate()
        for launcher in self.launchers.values():
            try:
                launcher.wait(20)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        for server in self.servers:
            server.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        made = Site(stack.enter_context(network((*NODES, *KEEPERS))), tmp_path)
        stack.callback(made.close)
        yield made


@pytest.fixture
def reference(reference_of: Reference) -> Outcome:
    return reference_of(Cell(program=TWO, steps=CELL.steps, deadline_s=150.0))


def answers(net: Network, host: str, url: str) -> bool:
    ask = f"import urllib.request; assert b'true' in urllib.request.urlopen({url!r}, timeout=2).read()"
    command = net.command(host, [sys.executable, "-c", ask])
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.etcd
def test_a_leader_on_the_minority_side_commits_nothing(site: Site, reference: Outcome) -> None:
    """With one of the three members of etcd and one node that trains, it is cut off from all the rest."""
    require_etcd()
    net, addresses = site.net, {host: site.net.addresses[host] for host in KEEPERS}
    etcd = Cluster(site.directory / "etcd", addresses, {host: net.command(host, []) for host in KEEPERS})
    try:
        etcd.wait(lambda host, url: answers(net, host, f"{url}/health"))
        for host in ("k0", "k1"):
            folder = site.directory / host
            folder.mkdir()
            made = coordinator(host, folder, CELL, etcd.url, net.command(host, []), f"{net.addresses[host]}:29400", "8")
            site.servers.append(made)
            if host == "k0":
                site.wait_for("coordinator_started")
        site.launch(["--coordinator", ",".join(f"{net.addresses[host]}:29400" for host in ("k0", "k1"))])
        site.wait_for("spare_ready")
        site.wait_for("recovery_done")
        minority, majority = ("k0", "a"), ("b", "c", "k1", "k2")
        cut_at = time.time()
        for host in minority:
            net.cut_both(host, majority)
        stepped_down = site.wait_for("coordinator_stepped_down", cut_at)
        led = site.wait_for("coordinator_started", cut_at)
        assert (stepped_down["host"], led["host"]) == ("k0", "k1")
        assert stepped_down["time"] < led["time"]
        done = site.wait_for("recovery_done", cut_at)
        assert done["host"] == "k1"
        net.heal()
        events = site.finish("b", reference)
        late = [e for e in events if e["host"] == "k0" and e["time"] > stepped_down["time"]]
        assert not late, late
        alone = [e for e in events if e["host"] == "k0" and e["time"] > cut_at and e["event"] == "recovery_planned"]
        assert not alone, alone
    finally:
        etcd.close()


def test_the_node_of_rank_0_is_lost_with_the_leader_on_it(site: Site, reference: Outcome) -> None:
    net = site.net
    kept = store(site.directory, 29399, net.command("k0", []), net.addresses["k0"])
    site.servers.append(kept)
    endpoints = ",".join(f"{net.addresses[host]}:29400" for host in ("a", "b"))
    site.launch(["--rdzv-endpoint", endpoints, "--store", f"tcp://{net.addresses['k0']}:29399"])
    site.wait_for("spare_ready")
    first = site.wait_for("job_started")
    site.wait_for("recovery_done")
    lost = [event["host"] for event in site.events if event["event"] == "coordinator_started"][-1]
    lost_at = time.time()
    pids = json.loads((site.directory / lost / "job" / "pids.json").read_text())
    groups = [pids["coordinator"], *pids["agents"].values()]
    site.launchers[lost].kill()
    for pid in groups:
        os.killpg(pid, signal.SIGKILL)
    assert first["nodes"][0].startswith("a#") or lost == "b"
    led = site.wait_for("coordinator_started", lost_at)
    assert led["host"] != lost
    promoted = site.wait_for("spare_promoted", lost_at)
    assert promoted["replaces"].startswith(f"{lost}#") and promoted["node"].startswith("c#")
    site.wait_for("recovery_done", lost_at)
    site.finish("c", reference)
