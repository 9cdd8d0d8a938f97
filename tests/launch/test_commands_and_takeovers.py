"""Commands to a job whose coordinators come and go, all of them processes; its node speaks as an agent does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command_kit import TOKEN, describe_job

from hotswap.cli import main
from hotswap.config import AgentConfig, Timing
from hotswap.core import messages as m
from hotswap.core.types import Endpoint
from hotswap.node.control import ControlChannel

DEADLINE_S = 20.0
LEASE_S = 3.0
"""The shortest there is."""
Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server of hotswap's; its process and port."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    with ExitStack() as stack:

        def made(*command: str) -> tuple[subprocess.Popen[bytes], int]:
            arguments = [sys.executable, "-m", "hotswap.cli", *command, "--token-file", str(token)]
            process = stack.enter_context(
                subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, int(json.loads(process.stdout.readline())["port"])

        yield made


class Node(threading.Thread):
    """An agent as its coordinators see it: it accepts every membership, and nothing ever becomes of it."""

    def __init__(self, directory: Path, ports: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.config = AgentConfig(
            job_id="job", token=TOKEN, node="a", coordinator_host="127.0.0.1", coordinator_port=ports[0],
            coordinators=tuple(("127.0.0.1", port) for port in ports[1:]), nproc_per_node=1, nodes_active=1,
            entry=("train.py",), log_dir=str(directory), timing=Timing(leader_s=LEASE_S),
        )  # fmt: skip
        self.generation = 0
        self.told: list[Any] = []
        self.over = threading.Event()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.ident is not None:
            self.join(DEADLINE_S)

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        channel = ControlChannel(self.config, self.register, self.hear)
        running = asyncio.create_task(channel.run())
        while not self.over.is_set():
            channel.send(m.Heartbeat(generation=self.generation))
            await asyncio.sleep(self.config.timing.heartbeat_s)
        running.cancel()

    def register(self) -> m.Register:
        places = ("a#1",) if self.generation else ()
        endpoint = Endpoint(host="127.0.0.1", port=1)
        return m.Register(node="a#1", fault_domain="", endpoint=endpoint, generation=self.generation, places=places)

    def hear(self, message: Any) -> None:
        if isinstance(message, m.Fence):
            self.generation = message.generation
        self.told.append(message)

    def wait_for(self, kind: type[Any]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not any(isinstance(message, kind) for message in self.told):
            assert time.monotonic() < end, f"no {kind.__name__} but {self.told}"
            time.sleep(0.02)


def test_the_leader_is_lost_and_a_node_is_drained_through_the_next_one(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, store = start("store", "--listen", "127.0.0.1:0", "--file", str(tmp_path / "store.json"))
    command = ["coordinator", "--nnodes", "1", "--nproc-per-node", "1", "--rdzv-id", "job", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(tmp_path), "--lease-s", str(LEASE_S), "--store", f"tcp://127.0.0.1:{store}"]
    leader, first = start(*command)
    with Node(tmp_path, [first]) as before:
        before.start()
        before.wait_for(m.Fence)
        _, second = start(*command)
        describe_job(tmp_path, [first, second], takeover_s=DEADLINE_S)
        leader.kill()
        leader.wait()
    # Nobody leads now; then the second one does, and has not heard the node, which is there.
    with Node(tmp_path, [second]) as node:
        node.generation = before.generation
        coming = threading.Timer(1.5 * LEASE_S, node.start)
        coming.start()
        assert main(["drain", str(tmp_path), "a"]) == 0
        assert capsys.readouterr().out == "a leaves as soon as another node has its place\n"
        coming.join()
        node.wait_for(m.DrainNode)
