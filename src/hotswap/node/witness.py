"""What a node can say about why one of its workers has ended: the lines of its last words that matter."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from hotswap.core.messages import Clue, WorkerEvidence
from hotswap.core.types import Slot
from hotswap.diagnosis import RuleBook, diagnose, facts
from hotswap.diagnosis.cause import default_book
from hotswap.diagnosis.model import Evidence
from hotswap.diagnosis.readers import Reader
from hotswap.node.kernel_log import KMSG, KernelLog
from hotswap.node.machine import Machine
from hotswap.replication import memory

log = logging.getLogger("hotswap.agent")
CLOSE_S = 2.0
"""How long an agent that leaves may go on reading the last words of its workers."""
KERNEL = "kernel log"
"""Source of what is about the machine and not about one of its workers."""
VMSTAT = Path("/proc/vmstat")
KILL_COUNTS = ("cgroup", "host_kills")
"""Kinds of evidence that count kills for memory, the surer first."""
TAIL_BYTES = 256 << 10
CLUES_MAX = 16
TEXT_CHARS_MAX = 500


class Witness:
    """One node's."""

    def __init__(self, node: str, kernel_log: Path = KMSG) -> None:
        """Follows from now on what the kernel says, and what it kills for memory in this process's control group."""
        self._node = node
        self._kernel = KernelLog(kernel_log)
        self._machine = Machine(node)
        self._killed = _oom_kills()
        self._lock = threading.Lock()

    def clues_of(self, paths: Iterable[Path], *, rank: int, with_machine: bool = True) -> tuple[Clue, ...]:
        """Of the worker that wrote *paths*: what decides here and what only echoes, the former first. Takes a while.

        *with_machine*: ask the machine as well, which can take longer than all the rest.
        """
        found = read_outputs(paths, rank=rank, node=self._node)
        if with_machine:
            with self._lock:
                found += self._of_the_machine()
        answer = diagnose(found, book=_reader()[0])
        # Whether anybody was killed for memory decides nothing by itself, but tells what another's end was, or was not.
        spared = [one for one in found if one.kind in KILL_COUNTS and one.fact("oom_kill") is not None]
        spared = [one for one in spared if one not in answer.deciding and one not in answer.echoes]
        told = [*answer.deciding, *answer.echoes][: CLUES_MAX - len(spared)]
        return tuple(clue_of(one) for one in [*told, *spared])

    def _of_the_machine(self) -> list[Evidence]:
        """What the kernel has said and done since the last time."""
        found = []
        for order, (at, text) in enumerate(self._kernel.read()):
            lines = _reader()[1].read_stream(io.BytesIO(text.encode()), source=KERNEL, node=self._node)
            found += [replace(one, time=at, order=order) for one in lines]
        found += self._machine.facts()
        before, self._killed = self._killed, _oom_kills()
        for of in KILL_COUNTS:
            if of in before and of in self._killed:
                killed = self._killed[of] - before[of]
                found.append(facts.oom_kills(killed, of=of, node=self._node, time=time.time()))
                break  # What is known of this control group is not made surer by the rest of the machine.
        return found


class LastWords:
    """What a node has to say about its workers that have ended, said when there is time for it."""

    def __init__(self, witness: Witness, send: Callable[[WorkerEvidence], None]) -> None:
        """*send* takes each testimony to the coordinator."""
        self._witness = witness
        self._send = send
        self._unread: list[tuple[Slot, tuple[Path, ...]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, slot: Slot, outputs: tuple[Path, ...]) -> None:
        """A worker has ended. Nothing is read yet: a recovery needs the processor more."""
        self._unread.append((slot, outputs))

    def give(self) -> None:
        """Training goes on, or this node is about to leave."""
        if self._unread:
            batch, self._unread = self._unread, []
            task = asyncio.get_running_loop().create_task(self._read_all(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give what is left, within a deadline."""
        self.give()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _read_all(self, batch: list[tuple[Slot, tuple[Path, ...]]]) -> None:
        """The machine is asked once, and last: nobody's words wait for it."""
        for left, (slot, outputs) in zip(reversed(range(len(batch))), batch, strict=True):
            await self._read(slot, outputs, with_machine=left == 0)

    async def _read(self, slot: Slot, outputs: tuple[Path, ...], *, with_machine: bool) -> None:
        try:
            clues = await asyncio.to_thread(self._witness.clues_of, outputs, rank=slot, with_machine=with_machine)
        except Exception:
            log.exception("the output of the worker of slot %d could not be read", slot)
        else:
            self._send(WorkerEvidence(slot=slot, clues=clues))


def _oom_kills() -> dict[str, int]:
    """How often the kernel has killed for memory: of this control group, and on the whole machine, where it says so.

    The machine's count (https://docs.kernel.org/filesystems/proc.html, vmstat) is there in containers as well, which see neither
    the kernel's log nor, at the root of their own hierarchy, a file of events.
    """
    texts = {"cgroup": memory.control_group_file("memory.events"), "host_kills": _text(VMSTAT)}
    found = {}
    for of, text in texts.items():
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                found[of] = int(value)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@cache
def _reader() -> tuple[RuleBook, Reader]:
    book = default_book()
    return book, Reader(book)


def read_outputs(paths: Iterable[Path], *, rank: int, node: str) -> list[Evidence]:
    """What stands in a worker's output files; of large ones, at their ends."""
    reader = _reader()[1]
    found: list[Evidence] = []
    for path in paths:
        found += reader.read_stream(io.BytesIO(_tail(path)), source=path.name, rank=rank, node=node)
    return found


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def clue_of(one: Evidence) -> Clue:
    """As it is sent."""
    return Clue(
        kind=one.kind,
        source=one.source,
        text=one.text[:TEXT_CHARS_MAX],
        order=one.order,
        count=one.count,
        time=one.time,
        gpu=one.gpu,
        facts=dict(one.facts),
    )
