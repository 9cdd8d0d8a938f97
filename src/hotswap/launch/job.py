"""One launcher's part of a job: which processes it starts, how it supervises them, and what it leaves behind: logs only."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hotswap.config import AgentConfig, CoordinatorConfig
from hotswap.errors import EXIT_REQUEUE, HotswapError, UsageError
from hotswap.launch import admission, command
from hotswap.launch import place as places
from hotswap.launch.console import Follower
from hotswap.launch.options import Options
from hotswap.launch.processes import Child, Waker, end, expect, start
from hotswap.launch.shared_flags import SECRETS as SHARED_SECRETS
from hotswap.node.gpus import visible
from hotswap.node.process import DRAIN_SIGNAL, make_private_directory
from hotswap.observability.report import as_text, read_events, report_of

COORDINATOR_RESTARTS_MAX = 20
WAKE_S = 0.5
LOOK_S = 0.1
LAST_WORDS_S = 5.0
INCARNATION_MAX = 10**6
COORDINATOR, AGENT = "hotswap.node.coordinator", "hotswap.node.agent"
STREAMS = (2, 8)
"""Fewest and most connections for one replica."""
PRELOADED = ("hotswap.session.start", "torch._dynamo")
"""Always preloaded, for every protected worker needs them: the first imports torch's sharding packages, which takes seconds, and the
second is what torch's optimizers and wrappers import when they are first used."""
FORK_SERVER = "HOTSWAP_FORK_SERVER"
FORK_SERVER_TOKEN = "HOTSWAP_FORK_SERVER_TOKEN"
SECRETS = (FORK_SERVER, FORK_SERVER_TOKEN, *SHARED_SECRETS)
"""Not for the processes of a job, whose environment the user's script and all it starts can read."""


class Job:
    """Start, supervise, clean up. A context manager: whatever happens inside, no process outlives it."""

    def __init__(self, options: Options, fork_server: Child | None = None) -> None:
        """*fork_server*: one that was started already and waits for its settings; it ends with the job."""
        self.options = options
        self.place = places.find(options)
        self.job_id = _job_id(options)
        root = Path(options.log_dir) if options.log_dir else Path(tempfile.mkdtemp(prefix="hotswap-logs-"))
        self.directory = (root / self.job_id).resolve()
        self.events = self.directory / "events.jsonl"
        self._token = options.token or secrets.token_hex(32)
        self._port = self.place.coordinator_port
        self._coordinator: Child | None = None
        self._fork_server = fork_server
        self._agents: list[Child] = []
        self._restarts = 0
        self._told = ""
        self._names: list[socket.socket] = []
        self._follower: Follower | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Job:
        """Take over the signals."""
        make_private_directory(self.directory)
        if self.options.console is not None:
            self._follower = Follower(self.directory, self.options.console, self.options.nproc_per_node)
        self._waker = Waker(self.options.signals, self.options.drain_on)
        self._cleanup.callback(self._waker.close)
        return self

    def __exit__(self, *_: object) -> None:
        """End everything that is left."""
        try:
            self._end_all()
        finally:
            self._cleanup.close()

    def _end_all(self) -> None:
        others = [child for child in (self._coordinator, self._fork_server) if child is not None]
        end([*self._agents, *others], lambda: self._waker.hurry)
        for lock in self._names:
            lock.close()
        if self._follower is not None:
            self._follower.close()

    def run(self) -> int:
        """Run the job to its end; its exit code."""
        for notice in self.options.notices:
            print(f"hotswap: {notice}", file=sys.stderr)
        if not self.options.log_dir:
            print(f"hotswap: logs are in {self.directory}", file=sys.stderr)
        self._require_fit()
        if self.place.hosts_coordinator:
            self._start_or_join_coordinator()
        server, server_token = self._open_fork_server()
        for name in self.place.names:
            self._start_agent(name, server, server_token)
        self._describe()
        return self._supervise()

    def _require_fit(self) -> None:
        for name in self.place.names:
            if self.options.node_history:
                admission.require_not_quarantined(name, Path(self.options.node_history))
        if self.options.probe:
            admission.require_healthy(self.place.names[0])

    # --- starting --------------------------------------------------------------------------------------------------

    def _open_fork_server(self) -> tuple[str, str]:
        """Path and token of the fork server; empty when workers are to be started one interpreter at a time."""
        if self.options.preload is None:
            return "", ""
        if FORK_SERVER in os.environ:
            return os.environ[FORK_SERVER], os.environ.get(FORK_SERVER_TOKEN, "")
        # Made and removed by the server, which notices the end of a killed launcher; by us if the server is killed.
        private = Path(tempfile.gettempdir()) / f"hotswap-{secrets.token_hex(8)}"
        self._cleanup.callback(shutil.rmtree, private, ignore_errors=True)
        path, log, token = str(private / "fork.sock"), self.directory / "fork-server.log", secrets.token_hex(32)
        if self._fork_server is None:
            self._fork_server = start_fork_server()
        self._fork_server.tell(
            {
                "socket": path,
                "token": token,
                "preload": [*self.options.preload, *PRELOADED],
                "path": [_folder(self.options.entry)],
                "log": str(log),
            }
        )
        expect(self._fork_server, "ready", log)
        return path, token

    def _start_or_join_coordinator(self) -> None:
        try:
            self._start_coordinator()
        except UsageError:
            # Two launchers on one machine both take the endpoint for theirs, and the first one has it.
            if not (self.place.may_join and places.is_taken(self.place.coordinator_bind, self._port)):
                raise
            self._coordinator = None

    def _start_coordinator(self) -> None:
        options, log = self.options, self.directory / "coordinator.log"
        config = CoordinatorConfig(
            job_id=self.job_id,
            token=self._token,
            restarted=self._restarts > 0,
            host=self.place.coordinator_bind,
            port=self._port,
            nodes_active=options.nodes_active,
            nodes_max=options.nodes_max,
            nproc_per_node=options.nproc_per_node,
            timing=options.timing,
            respawns_max=options.respawns_max,
            spare_wait_s=options.spare_wait_s,
            spare_first=options.spare_first,
            replicas=options.replicas,
            evict_slow=options.evict_slow,
            keep_groups=options.keep_groups,
            nodes_min=options.min_nodes,
            join_s=options.join_s,
            events_path=str(self.events),
            checkpoint_dir=options.checkpoint_dir or None,
            node_history=options.node_history or None,
            allow_inject=options.allow_inject,
            store=options.store,
            advertise_host=self.place.advertise_host,
        )
        self._coordinator = start("coordinator", COORDINATOR, log=log, answers=True, without=SECRETS)
        self._coordinator.tell(config)
        self._port = int(expect(self._coordinator, "port", log))

    def _start_agent(self, name: str, server: str, server_token: str) -> None:
        options, place = self.options, self.place
        if not options.standalone:
            name, lock = places.claim(self.job_id, name)
            self._names.append(lock)
        config = AgentConfig(
            job_id=self.job_id,
            token=self._token,
            node=name,
            # A node that comes back on its machine is a new one; nodes of different machines have different names.
            incarnation=1 if options.standalone else 1 + secrets.randbelow(INCARNATION_MAX),
            fault_domain=options.fault_domain,
            coordinator_host=place.coordinator_host,
            coordinator_port=self._port,
            coordinators=place.others,
            bind_host=place.bind_host,
            advertise_host=place.advertise_host,
            nproc_per_node=options.nproc_per_node,
            nodes_active=options.nodes_active,
            drain_s=options.drain_s,
            entry=options.entry,
            env=self._worker_environment,
            gpus=visible() if options.standalone else (),
            kernel_log=options.kernel_log.replace("{node}", name) or "/dev/kmsg",
            allow_inject=options.allow_inject,
            log_dir=str(self.directory),
            fork_server=server or None,
            fork_server_token=server_token,
            timing=options.timing,
            spare_positions=options.spare_positions,
            transfer_streams=options.transfer_streams or streams_for(options.nproc_per_node * len(place.names)),
            checkpoint_dir=options.checkpoint_dir or None,
            checkpoint_interval_steps=options.checkpoint_interval_steps,
            snapshot_interval_steps=options.snapshot_interval_steps,
            overhead_limit=options.overhead_limit,
            integrity_every_steps=options.integrity_every_steps,
            resizes=options.min_nodes > 0,
        )
        agent = start(name, AGENT, log=self.directory / name / "agent.log", without=SECRETS)
        self._agents.append(agent)
        agent.tell(config)

    @functools.cached_property
    def _worker_environment(self) -> dict[str, str]:
        """torchrun's variables that are the same for all workers of this launcher."""
        options = self.options
        return {
            "MASTER_PORT": str(places.free_port() if options.standalone else options.master_port),
            "ROLE_NAME": options.role,
            "TORCHELASTIC_MAX_RESTARTS": str(options.respawns_max),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _describe(self) -> None:
        """Files by which other commands find this job; never the token, only where it is."""
        coordinator = self._coordinator.process.pid if self._coordinator is not None else None
        pids = {"coordinator": coordinator, "agents": {child.name: child.process.pid for child in self._agents}}
        timing, place = self.options.timing, self.place
        described = command.describe(
            ((place.coordinator_host, self._port), *place.others),
            # One that leads since just now hears the nodes first.
            takeover_s=timing.lease_s + timing.lease_beat_s + timing.detection_budget_s,
            token_file=self.options.token_file or str(self._own_token_file()),
        )
        described |= {"job_id": self.job_id, "events": str(self.events)}
        for name, content in (("pids.json", pids), (command.FILE, described)):
            _write_private(self.directory / name, json.dumps(content) + "\n")

    def _own_token_file(self) -> Path:
        path = self.directory / "token"
        if not path.exists():
            _write_private(path, self._token)
            self._cleanup.callback(path.unlink, missing_ok=True)
        return path

    # --- supervising -----------------------------------------------------------------------------------------------

    def _supervise(self) -> int:
        while self._waker.asked is None:
            self._wait(WAKE_S)
            self._drain_if_told()
            code = self._watch_coordinator() if self._coordinator is not None else self._watch_agents()
            if code is not None:
                self._wait_for_agents()
                return code
        return self._stop_politely(self._waker.asked)

    def _drain_if_told(self) -> None:
        """Pass a notice on to this node's agent, once."""
        reason = self._waker.noticed
        if self._told or not reason:
            return
        self._told = reason
        if self.options.standalone:
            print(f"hotswap: {reason}: all nodes of this job are here; see hotswap drain --help", file=sys.stderr)
            return
        for agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.process.pid, DRAIN_SIGNAL)
        print(f"hotswap: {reason}: this node leaves as soon as another one has its place", file=sys.stderr)

    def _wait(self, timeout_s: float) -> None:
        if self._follower is None:
            self._waker.wait(timeout_s)
        else:
            self._waker.wait(min(timeout_s, LOOK_S))
            self._follower.look()

    def _watch_coordinator(self) -> int | None:
        """The job's exit code once the coordinator has left with one; a crashed coordinator is started again."""
        child = self._coordinator
        assert child is not None
        status = child.code
        # A stand-alone job has only the nodes it was started with.
        deserted = self.options.standalone and all(agent.code is not None for agent in self._agents)
        # Agents that were told to stop may be gone before the coordinator has said how the job ended.
        last = _hear(child, LAST_WORDS_S if deserted and status is None else 0)
        if last is not None and "exit_code" in last:
            return int(last["exit_code"])
        if status is None:
            return EXIT_REQUEUE if deserted else None
        self._restarts += 1
        if self._restarts > COORDINATOR_RESTARTS_MAX:
            raise HotswapError(
                f"the coordinator died {self._restarts} times, the last time with status {status}; "
                f"see {self.directory}/coordinator.log"
            )
        print(f"hotswap: the coordinator died (status {status}); starting it again, training goes on", file=sys.stderr)
        end([child])
        self._start_coordinator()
        self._describe()
        return None

    def _watch_agents(self) -> int | None:
        codes = [agent.code for agent in self._agents]
        if any(code is None for code in codes):
            return None
        if self.options.standalone and 0 in codes:
            return 0  # The others were lost on the way.
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def _wait_for_agents(self) -> None:
        """Agents leave by themselves when they are told to stop; whoever does not is ended by ``__exit__``."""
        patience_s = self.options.stop_s
        if patience_s is None:
            patience_s = 2 * self.options.timing.detection_budget_s
        deadline = time.monotonic() + patience_s
        while any(agent.code is None for agent in self._agents) and not self._waker.hurry:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wait(left)

    def _stop_politely(self, number: int) -> int:
        """The coordinator tells everybody; without one here, or with others elsewhere, this node leaves."""
        coordinator = self._coordinator
        if coordinator is not None and coordinator.code is None:
            # Of several, only the one that leads can end the job, and does so for somebody at a terminal.
            coordinator.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            leaving = self._agents if self.options.store is not None and number != signal.SIGINT else []
        else:
            leaving = self._agents
        for child in leaving:
            child.signal(signal.SIGTERM)
        self._wait_for_agents()
        return 128 + number


def _hear(coordinator: Child, timeout_s: float) -> dict[str, Any] | None:
    """Its next word that is not just for people."""
    while (said := coordinator.hear(timeout_s)) is not None and "warning" in said:
        print(f"hotswap: {said['warning']}", file=sys.stderr, flush=True)
    return said


def start_fork_server(*modules: str) -> Child:
    """A fork server that imports *modules* at once and then waits for its settings."""
    return start("fork server", "hotswap.node.forkserver", *modules, answers=True, without=SECRETS)


def _job_id(options: Options) -> str:
    if options.job_id:
        return options.job_id
    if options.standalone:
        return f"job-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    # The same on every node without a word between them.
    return "job-" + hashlib.sha256(f"{options.endpoint} {options.token}".encode()).hexdigest()[:12]


def _folder(entry: tuple[str, ...]) -> str:
    """Where the script's own imports are looked for: its folder, or the current one for a module."""
    return os.getcwd() if entry[0] == "-m" else os.path.dirname(os.path.abspath(entry[0]))


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


def main(argv: list[str]) -> int:
    """``hotswap run``."""
    # The server's import of torch and ours, for torchrun's parser, take a second each: at the same time.
    early = FORK_SERVER not in os.environ and not {"--no-preload", "-h", "--help"} & set(argv)
    server = start_fork_server("torch") if early else None
    try:
        from hotswap.launch.arguments import parse

        return run(parse(argv), server)
    finally:
        if server is not None:
            end([server])


def run(options: Options, fork_server: Child | None = None) -> int:
    """Run a job from its start to its end and say how it ended; its exit code."""
    with Job(options, fork_server) as job:
        code = job.run()
    _report(job, code)
    return code


def _report(job: Job, code: int) -> None:
    outcome: dict[str, Any] = {
        "exit_code": code,
        "job_id": job.job_id,
        "log_dir": str(job.directory),
        "events": str(job.events),
    }
    report = report_of(read_events(job.events)) if job.events.is_file() else None
    if job.options.json:
        print(json.dumps({**outcome, "report": report.as_json() if report is not None else None}))
        return
    if code:
        print(f"hotswap: job {job.job_id} ended with {code}; logs in {job.directory}", file=sys.stderr)
    if report is not None and (report.recoveries or report.diagnosis):
        print("".join(f"hotswap: {line}\n" for line in as_text(report).splitlines()), end="", file=sys.stderr)


def streams_for(workers: int) -> int:
    """Connections for one replica, when *workers* of this machine send theirs at once.

    Each end of each fills a processor; half of the processors are left to training, which a full machine would slow down.
    """
    return max(STREAMS[0], min(STREAMS[1], len(os.sched_getaffinity(0)) // (4 * workers)))
