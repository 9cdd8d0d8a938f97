"""One launcher's part of a job: which processes it starts, how it supervises them, and what it leaves behind: logs only."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.config import AgentConfig, CoordinatorConfig, Timing
from hotswap.errors import EXIT_REQUEUE, HotswapError, UsageError
from hotswap.launch.arguments import Options, report
from hotswap.launch.follow import Follower
from hotswap.launch.processes import Child, Waker, end, expect, start

COORDINATOR_RESTARTS_MAX = 20
WAKE_S = 0.5
LAST_WORDS_S = 5.0
SESSION = "hotswap.session.session"
"""Always preloaded: every protected worker needs it, and torch's sharding packages that it imports take seconds."""
FORK_SERVER = "HOTSWAP_FORK_SERVER"
FORK_SERVER_TOKEN = "HOTSWAP_FORK_SERVER_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this launcher stands: addresses, and whether the coordinator is its child."""

    coordinator_host: str
    coordinator_port: int
    hosts_coordinator: bool
    bind_host: str
    advertise_host: str
    names: tuple[str, ...]


class Job:
    """Start, supervise, clean up. A context manager: whatever happens inside, no process outlives it."""

    def __init__(self, options: Options) -> None:
        """Nothing is started before ``run``."""
        self.options = options
        self.job_id = options.job_id or f"job-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        root = Path(options.log_dir) if options.log_dir else Path(tempfile.mkdtemp(prefix="hotswap-"))
        self.directory = (root / self.job_id).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.events = self.directory / "events.jsonl"
        self.place = _place(options)
        self._token = options.token or secrets.token_hex(32)
        self._timing = Timing(detection_budget_s=options.detection_budget_s)
        self._private = Path(tempfile.mkdtemp(prefix="hotswap-private-"))
        self._port = self.place.coordinator_port
        self._coordinator: Child | None = None
        self._fork_server: Child | None = None
        self._agents: list[Child] = []
        self._restarts = 0
        self._waker = Waker()
        self._follower = Follower(self.directory)

    def __enter__(self) -> Job:
        """The job."""
        return self

    def __exit__(self, *_: object) -> None:
        """End everything that is left."""
        end([*self._agents, *(child for child in (self._coordinator, self._fork_server) if child is not None)])
        self._waker.close()
        shutil.rmtree(self._private, ignore_errors=True)

    def run(self) -> int:
        """Run the job to its end; its exit code."""
        report(self.options.notices)
        server, server_token = self._start_fork_server()
        if self.place.hosts_coordinator:
            self._start_coordinator()
        for name in self.place.names:
            self._start_agent(name, server, server_token)
        self._describe()
        if self.options.quiet or self.options.json:
            return self._supervise()
        self._follower.start()
        try:
            return self._supervise()
        finally:
            self._follower.close()

    # --- starting --------------------------------------------------------------------------------------------------

    def _start_fork_server(self) -> tuple[str, str]:
        """Path and token of the fork server; empty when workers are to be started one interpreter at a time."""
        if not self.options.preload:
            return "", ""
        if FORK_SERVER in os.environ:
            return os.environ[FORK_SERVER], os.environ[FORK_SERVER_TOKEN]
        path, log = str(self._private / "fork-server.sock"), self.directory / "fork-server.log"
        token = secrets.token_hex(32)
        settings = {"socket": path, "token": token, "preload": [*self.options.preload, SESSION]}
        self._fork_server = start("fork server", "hotswap.node.forkserver", settings, log, answers=True)
        expect(self._fork_server, "ready", log)
        return path, token

    def _start_coordinator(self) -> None:
        options, log = self.options, self.directory / "coordinator.log"
        config = CoordinatorConfig(
            job_id=self.job_id,
            token=self._token,
            host=self.place.coordinator_host,
            port=self._port,
            nodes_active=options.nodes_active,
            nodes_max=options.nodes_max,
            nproc_per_node=options.nproc_per_node,
            timing=self._timing,
            respawns_max=options.respawns_max,
            spare_wait_s=options.spare_wait_s,
            join_s=options.join_s,
            events_path=str(self.events),
            checkpoint_dir=options.checkpoint_dir or None,
        )
        self._coordinator = start("coordinator", "hotswap.node.coordinator", config, log, answers=True)
        self._port = int(expect(self._coordinator, "port", log))

    def _start_agent(self, name: str, server: str, server_token: str) -> None:
        options, place = self.options, self.place
        config = AgentConfig(
            job_id=self.job_id,
            token=self._token,
            node=name,
            fault_domain=options.fault_domain,
            coordinator_host=place.coordinator_host,
            coordinator_port=self._port,
            bind_host=place.bind_host,
            advertise_host=place.advertise_host,
            nproc_per_node=options.nproc_per_node,
            nodes_active=options.nodes_active,
            entry=options.entry,
            env={"MASTER_PORT": str(_free_port() if options.standalone else options.master_port)},
            log_dir=str(self.directory),
            fork_server=server or None,
            fork_server_token=server_token,
            timing=self._timing,
            spare_positions=options.spare_positions,
            transfer_streams=options.transfer_streams,
            checkpoint_dir=options.checkpoint_dir or None,
            checkpoint_interval_steps=options.checkpoint_interval_steps,
        )
        log = self.directory / name / "agent.log"
        self._agents.append(start(name, "hotswap.node.agent", config, log, group=True))

    def _describe(self) -> None:
        """Files by which other commands find this job; never the token."""
        coordinator = self._coordinator.process.pid if self._coordinator is not None else None
        pids = {"coordinator": coordinator, "agents": {child.name: child.process.pid for child in self._agents}}
        described = {
            "job_id": self.job_id,
            "host": self.place.coordinator_host,
            "port": self._port,
            "events": str(self.events),
        }
        for name, content in (("pids.json", pids), ("job.json", described)):
            temporary = self.directory / f".{name}"
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self.directory / name)

    # --- supervising -----------------------------------------------------------------------------------------------

    def _supervise(self) -> int:
        while True:
            self._waker.wait(WAKE_S)
            if self._waker.asked is not None:
                return self._stop_politely(self._waker.asked)
            code = self._watch_coordinator() if self._coordinator is not None else self._watch_agents()
            if code is not None:
                return self._wait_for_agents(code)

    def _watch_coordinator(self) -> int | None:
        """The job's exit code once the coordinator has left with one; a crashed coordinator is started again."""
        child = self._coordinator
        assert child is not None
        status = child.code
        deserted = self._alone() and all(agent.code is not None for agent in self._agents)
        if status is None and not deserted:
            return None
        # Agents that were told to stop may be gone before the coordinator has said how the job ended.
        last = child.hear(LAST_WORDS_S if status is None else 0)
        if last is not None and "exit_code" in last:
            return int(last["exit_code"])
        if status is None:
            return EXIT_REQUEUE
        self._restarts += 1
        if self._restarts > COORDINATOR_RESTARTS_MAX:
            raise HotswapError(
                f"the coordinator died {self._restarts} times, the last time with status {status}; see {self.directory}/coordinator.log"
            )
        print(f"hotswap: the coordinator died (status {status}); starting it again, training goes on", file=sys.stderr)
        end([child])
        self._start_coordinator()
        self._describe()
        return None

    def _alone(self) -> bool:
        """Whether no node can join any more: a stand-alone job has only the nodes it was started with."""
        return self.options.standalone

    def _watch_agents(self) -> int | None:
        codes = [agent.code for agent in self._agents]
        if any(code is None for code in codes):
            return None
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def _wait_for_agents(self, code: int) -> int:
        """Agents leave by themselves when they are told to stop."""
        deadline = time.monotonic() + 2 * self._timing.detection_budget_s
        while any(agent.code is None for agent in self._agents) and time.monotonic() < deadline:
            self._waker.wait(WAKE_S / 10)
        return code

    def _stop_politely(self, number: int) -> int:
        """The coordinator tells everybody; whoever does not listen is ended by ``__exit__``."""
        target = [self._coordinator] if self._coordinator is not None else self._agents
        for child in target:
            child.signal(signal.SIGTERM)
        return self._wait_for_agents(128 + number)


def _place(options: Options) -> Place:
    if options.standalone:
        host = options.bind_host or "127.0.0.1"
        names = tuple(f"node{index}" for index in range(options.nodes_max))
        return Place(
            coordinator_host=host,
            coordinator_port=0,
            hosts_coordinator=True,
            bind_host=host,
            advertise_host=host,
            names=names,
        )
    if not options.endpoint:
        raise UsageError(
            "a job of several nodes needs --rdzv-endpoint HOST:PORT, the same on every node (or --standalone)"
        )
    if not options.token:
        raise UsageError(
            "a job of several nodes needs its token on every node: --token-file FILE, or set HOTSWAP_TOKEN"
        )
    host, port = _resolve(options.endpoint)
    local = options.node_rank == 0 if options.node_rank is not None else _is_local(host)
    own = options.bind_host or _address_towards(host)
    name = options.node_name or socket.gethostname()
    return Place(
        coordinator_host=host,
        coordinator_port=port,
        hosts_coordinator=local,
        bind_host=own,
        advertise_host=own,
        names=(name,),
    )


def _resolve(endpoint: str) -> tuple[str, int]:
    """Numeric address and port; names are looked up here, once, and nowhere else."""
    host, _, port = endpoint.rpartition(":")
    if not host:
        host, port = endpoint, "29400"
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise UsageError(f"--rdzv-endpoint {endpoint}: {error}") from None
    return str(found[0][4][0]), int(port)


def _is_local(host: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _address_towards(host: str) -> str:
    """This machine's address on the way to *host*; nothing is sent."""
    with contextlib.closing(
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    ) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main(argv: list[str]) -> int:
    """``hotswap run``."""
    from hotswap.launch.arguments import parse

    options = parse(argv)
    with Job(options) as job:
        code = job.run()
    outcome: dict[str, Any] = {
        "exit_code": code,
        "job_id": job.job_id,
        "log_dir": str(job.directory),
        "events": str(job.events),
    }
    if options.json:
        print(json.dumps(outcome))
    elif code:
        print(f"hotswap: job {job.job_id} ended with {code}; logs in {job.directory}", file=sys.stderr)
    return code
