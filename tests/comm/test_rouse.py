from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess, queued_bytes

from hotswap.comm.rouse import rouse
from hotswap.errors import Fenced

pytestmark = pytest.mark.usefixtures("gloo_swap")

ELEMENTS = 30_000_000
"""More bytes than fit into the sockets' buffers."""


def _collective() -> None:
    dist.all_reduce(torch.ones(1))


def _receive() -> None:
    dist.recv(torch.ones(1), 1)


def _requests_in_a_list() -> None:
    requests = [dist.irecv(torch.ones(1), 1), dist.irecv(torch.ones(1), 1)]
    for position in range(len(requests)):
        requests[position].wait()  # type: ignore[union-attr]


class _Bucket:
    """Holds its operation in an attribute, as gradient buckets do."""

    def __init__(self) -> None:
        self.handle = dist.all_reduce(torch.ones(1), async_op=True)

    def finish(self) -> None:
        self.handle.wait()  # type: ignore[union-attr]


def _attribute_of_self() -> None:
    _Bucket().finish()


@pytest.mark.parametrize("wait", [_collective, _receive, _requests_in_a_list, _attribute_of_self])
def test_a_thread_is_woken_from_an_operation_that_no_peer_takes_part_in(wait: Callable[[], None]) -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        process.barrier("connected")
        ended = 0
        if process.slot == 0:
            done = threading.Event()

            def keep_rousing() -> None:
                nonlocal ended
                while not done.wait(0.05):
                    ended += rouse(threading.main_thread().ident or 0)

            thread = threading.Thread(target=keep_rousing)
            thread.start()
            wait()
            done.set()
            thread.join()
        process.barrier("end")
        return ended

    assert Fleet(2).run(main)[0] > 0


def test_a_slot_that_dies_in_the_middle_of_a_message_does_not_leave_the_receiver_hanging() -> None:
    def main(process: SlotProcess) -> Any:
        process.groups.connect(1, process.values)
        tensor = torch.zeros(ELEMENTS)
        if process.slot == 0:
            process.values.get("receiving", 20.0)
            work = dist.isend(tensor, 1)
            deadline = time.monotonic() + 10.0
            while not queued_bytes(process):
                assert time.monotonic() < deadline
            process.die()
            return work
        watch = process.watch(1, threading.Event())
        process.values.set("receiving", b"")
        try:
            while True:
                process.groups.check()
                dist.recv(tensor, 0)
        except (Fenced, RuntimeError):
            return watch.park().parked

    results = Fleet(2).run(main)
    assert results == {0: "killed", 1: True}
