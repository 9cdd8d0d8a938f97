"""Starting workers and hearing from them, for the agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core.types import Generation, Slot
from hotswap.errors import HotswapError, PeerUnreachable, ProtocolError
from hotswap.node.gpus import share
from hotswap.node.process import make_private_directory
from hotswap.node.spawn import ExecSpawner, ForkServer, Spawner, SpawnRequest
from hotswap.node.stopped import StoppedWorkers
from hotswap.node.worker_process import WorkerProcess
from hotswap.session.settings import LINK_FD, STACKS_FD, WorkerSettings
from hotswap.wire.channels import worker_codec
from hotswap.wire.links import AsyncLink

log = logging.getLogger("hotswap.workers")
TARGET = "hotswap.session.worker:main"
DRAIN_S = 0.2
"""How long a dead worker's last words are waited for; a grandchild may keep its socket open for ever."""
END_S = 5.0
"""How long workers that are told to end may take to tidy up."""
REAP_S = 5.0


class WorkerPool:
    """Spawns worker processes and reports, for each, its messages in order and then its end."""

    def __init__(
        self,
        config: AgentConfig,
        on_message: Callable[[WorkerProcess, Any], None],
        on_end: Callable[[WorkerProcess], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Nothing is started before ``start``. *on_failure*: no worker can be started or watched any more."""
        self._config = config
        self._on_message = on_message
        self._on_end = on_end
        self._on_failure = on_failure
        self._spawner: Spawner | None = None
        self._by_number: dict[int, WorkerProcess] = {}
        self._calls: dict[int, Callable[[int], None]] = {}
        self._stopped = StoppedWorkers(config.timing.stopped_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect to the fork server, or get ready to start processes one by one."""
        config = self._config
        if config.fork_server:
            self._spawner = ForkServer.connect(config.fork_server, config.fork_server_token or config.token)
        else:
            self._spawner = ExecSpawner()
        asyncio.get_running_loop().add_reader(self._spawner.fileno(), self._reap)

    def spawn(self, slot: Slot, generation: Generation, *, rehearse: bool, master: str, nodes: int) -> WorkerProcess:
        """Start the worker of *slot* in a job of *nodes* nodes; *master* is the address of the node of slot 0."""
        assert self._spawner is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            logs = self._directory / f"gen{generation}"
            make_private_directory(logs)
            request = SpawnRequest(
                target=TARGET,
                args=list(self._config.entry),
                env=self._environment(slot, rehearse, master, nodes),
                cwd=os.getcwd(),
                stdout_path=str(logs / f"slot{slot}.out"),
                stderr_path=str(logs / f"slot{slot}.err"),
                pgid=os.getpgrp(),
                fd_names=[LINK_FD, STACKS_FD],
            )
            stacks = os.memfd_create(f"hotswap-stacks-{slot}")
            number = self._spawner.spawn(request, fds=[theirs.fileno(), stacks])
        finally:
            theirs.close()
        outputs = (Path(request.stdout_path), Path(request.stderr_path))
        worker = WorkerProcess(
            slot=slot, link=AsyncLink(ours, worker_codec()), outputs=outputs, number=number, stacks=stacks
        )
        self._by_number[number] = worker
        self._start_task(self._listen(worker))
        return worker

    @property
    def _directory(self) -> Path:
        return Path(self._config.log_dir) / self._config.node

    def end_stopped(self) -> None:
        """Kill workers that a signal has stopped: one holds up all others, which cannot tell it from one that computes."""
        assert self._spawner is not None
        workers = {self._spawner.pid(number): worker for number, worker in self._by_number.items()}
        for pid in self._stopped.overdue(workers, time.monotonic()):
            worker = workers[pid]
            worker.detail = f"stopped by a signal for more than {self._config.timing.stopped_s:g} s"
            self.kill(worker)

    def pid(self, worker: WorkerProcess) -> int:
        """0 while it is not known."""
        assert self._spawner is not None
        return self._spawner.pid(worker.number)

    def kill(self, worker: WorkerProcess, signal_number: int = signal.SIGKILL) -> None:
        """Signal the process of *worker*. Its end is reported like any other."""
        assert self._spawner is not None
        if worker.alive:
            self._spawner.kill(worker.number, signal_number)

    def call(
        self, target: str, args: list[Any], fds: list[int], fd_names: list[str], done: Callable[[int], None]
    ) -> None:
        """Run a function in a process of its own and report its exit status."""
        assert self._spawner is not None
        log_path = str(self._directory / "helpers.log")
        request = SpawnRequest(
            target=target,
            args=args,
            env={"OMP_NUM_THREADS": "1"},
            cwd=os.getcwd(),
            stdout_path=log_path,
            stderr_path=log_path,
            pgid=os.getpgrp(),
            fd_names=fd_names,
        )
        self._calls[self._spawner.spawn(request, fds=fds)] = done

    def _environment(self, slot: Slot, rehearse: bool, master: str, nodes: int) -> dict[str, str]:
        """Torchrun's variables, with ``rank == slot`` for ever, and hotswap's own."""
        config = self._config
        width, world = config.nproc_per_node, config.nproc_per_node * nodes
        settings = WorkerSettings(
            slot=slot,
            world_size=world,
            full_world_size=width * config.nodes_active,
            resizes=config.resizes,
            link_fd=-1,
            host=config.advertise_host,
            rehearse=rehearse,
            buffers=config.snapshot_buffers,
            checkpoint_dir=config.checkpoint_dir or "",
            checkpoint_interval_steps=config.checkpoint_interval_steps,
            snapshot_interval_steps=config.snapshot_interval_steps,
            overhead_limit=config.overhead_limit,
            integrity_every_steps=config.integrity_every_steps,
            settle_s=config.timing.settle_s,
            abort_s=config.timing.abort_s,
            # Whoever leads the job has an answer to trouble, be it only after its return.
            trouble_s=config.timing.coordinator_s,
            collective_timeout_s=config.timing.collective_timeout_s,
            heartbeat_s=config.timing.heartbeat_s,
            halt_s=config.timing.stand_s,
            durable_halt_s=config.timing.durable_stand_s,
        )
        own = settings.to_environment()
        del own[LINK_FD], own[STACKS_FD]
        return {
            # A worker's environment is its node's, whoever forks it: a fork server may have been started with another.
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MASTER_ADDR": master,
            "MASTER_PORT": "29500",
            **config.env,
            **share(config.gpus, slot // width, width),
            **own,
            "RANK": str(slot),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(slot % width),
            "LOCAL_WORLD_SIZE": str(width),
            "GROUP_RANK": str(slot // width),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(slot),
            "ROLE_WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": config.job_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def refuse(self, worker: WorkerProcess, error: HotswapError) -> None:
        """End a worker that asks for what cannot be had."""
        worker.detail = str(error)
        self.kill(worker)

    async def _listen(self, worker: WorkerProcess) -> None:
        try:
            while True:
                self._on_message(worker, await worker.link.receive())
        except PeerUnreachable as error:
            log.debug("slot %d: %s", worker.slot, error)
        except HotswapError as error:
            # It spoke nonsense; what it would say next nobody would hear.
            self.refuse(worker, error)
        worker.drained = True
        self._report_end(worker)

    def _reap(self) -> None:
        assert self._spawner is not None
        try:
            ended = self._spawner.poll()
        except HotswapError as error:
            asyncio.get_running_loop().remove_reader(self._spawner.fileno())
            self._on_failure(error)
            return
        for exited in ended:
            done = self._calls.pop(exited.number, None)
            if done is not None:
                done(exited.status)
                continue
            worker = self._by_number.get(exited.number)
            if worker is not None:
                if exited.error:
                    self._on_failure(ProtocolError(f"no worker of slot {worker.slot} can be started: {exited.error}"))
                worker.status = exited.status
                asyncio.get_running_loop().call_later(DRAIN_S, worker.link.close)
                self._report_end(worker)

    def _report_end(self, worker: WorkerProcess) -> None:
        """Only when the process is gone and all it said was heard: a snapshot it announced last still counts."""
        if worker.status is not None and worker.drained and self._by_number.pop(worker.number, None) is not None:
            if worker.stacks >= 0:
                os.close(worker.stacks)
            self._on_end(worker)

    def _start_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(error)

    async def close(self) -> None:
        """Ask the workers to leave, as torchrun would, then end every process this pool has started."""
        if self._spawner is None:
            return
        with contextlib.suppress(HotswapError):
            await self._end_all(signal.SIGTERM, END_S)
            await self._end_all(signal.SIGKILL, REAP_S)
        asyncio.get_running_loop().remove_reader(self._spawner.fileno())
        self._spawner.close()
        for worker in self._by_number.values():
            worker.link.close()
            if worker.stacks >= 0:
                os.close(worker.stacks)

    async def _end_all(self, signal_number: int, patience_s: float) -> None:
        assert self._spawner is not None
        for number in [*self._calls, *(worker.number for worker in self._by_number.values() if worker.alive)]:
            self._spawner.kill(number, signal_number)
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while (self._calls or any(worker.alive for worker in self._by_number.values())) and loop.time() < end:
            await asyncio.sleep(0.01)
