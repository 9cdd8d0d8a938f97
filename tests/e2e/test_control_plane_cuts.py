"""Coordinators, the store and the nodes on hosts of their own, of which some are cut off or lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_plane import LEASE_S, TWO, Server, coordinator, paced, store
from e2e_harness import Cell, Event, Outcome
from etcd_cluster import Cluster, require_etcd
from hosts import FIRST, Hosts, assert_same, needs_hosts

from hotswap.chaos.network import Network, network

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.full_matrix,
    needs_hosts,
    pytest.mark.timeout(300),
]
Reference = Callable[[Cell], Outcome]
CELL = paced(160)
NODES, KEEPERS = ("a", "b", "c"), ("k0", "k1", "k2")


class Site(Hosts):
    """A launcher on each of ``NODES``, and whatever else the job needs on other hosts."""

    def __init__(self, net: Network, directory: Path) -> None:
        super().__init__(net, directory, CELL)
        self.servers: list[Server] = []

    def launch_all(self, *flags: str) -> None:
        for host in NODES:
            self.launch(host, "--lease-s", str(LEASE_S), "--detection-budget-s", "8", *flags)

    def end(self, host: str, reference: Outcome) -> list[Event]:
        """The job ends on its own, with what it would have computed anyway, and no two memberships had one number."""
        outcome = self.finish(host)
        assert_same(outcome, reference)
        memberships = {(e["generation"], tuple(e["places"])) for e in outcome.named("recovery_started")}
        assert len(memberships) == len({generation for generation, _ in memberships}), memberships
        return list(outcome.events)

    def close(self) -> None:
        super().close()
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
        site.launch_all("--coordinator", ",".join(f"{net.addresses[host]}:29400" for host in ("k0", "k1")))
        site.wait_for("spare_ready")
        site.wait_for("recovery_done", FIRST)
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
        events = site.end("b", reference)
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
    site.launch_all("--rdzv-endpoint", endpoints, "--store", f"tcp://{net.addresses['k0']}:29399")
    site.wait_for("spare_ready")
    first = site.wait_for("job_started", FIRST)
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
    site.end("c", reference)
