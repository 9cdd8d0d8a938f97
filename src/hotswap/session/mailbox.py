"""What the agent has told this worker, shared between the listening thread and the thread that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hotswap.core import messages as m
from hotswap.core.types import Generation, Step
from hotswap.errors import Fenced, PeerUnreachable
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

T = TypeVar("T")
POLL_S = 1.0


class Mailbox:
    """The newest of everything. All waits end when the generation ends, when the job does, or when the agent is gone."""

    def __init__(self, link: WorkerLink) -> None:
        """*link*: where questions go."""
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._link = link
        self.fence: m.Fence | None = None
        self.connect: w.Connect | None = None
        self.load: w.Load | None = None
        self.go: Generation = 0
        self.acked: Step = -1
        self.acked_at = 0.0
        self.free = 0
        self.finish: w.Finish | None = None
        self.halt: m.Halt | None = None
        self.gone = ""
        self._grants = 0
        self._values: dict[str, bytes] = {}
        self._values_of: Generation = 0

    # --- the listening thread --------------------------------------------------------------------------------------

    def put(self, message: Any) -> None:
        """Take in one message."""
        with self._changed:
            if isinstance(message, m.Fence):
                self.fence = message
                self.connect = self.load = self.halt = None
                self.acked = -1
                self._values, self._values_of = {}, message.generation
            elif isinstance(message, w.Load):
                if message.generation == self.generation_told:
                    self.load, self.free = message, message.free
            elif isinstance(message, w.Acked):
                if message.generation == self.generation_told and message.step >= self.acked:
                    self.acked, self.free = message.step, message.free
                    self.acked_at = time.monotonic()
            elif isinstance(message, w.Granted):
                self._grants += 1
                self.free = message.free
            elif isinstance(message, w.Finish):
                self.finish = message
            else:
                self._put_rest(message)
            self._changed.notify_all()

    def _put_rest(self, message: Any) -> None:
        if isinstance(message, m.Go):
            self.go = message.generation
        elif isinstance(message, w.Connect) and message.generation == self.generation_told:
            self.connect = message
        elif isinstance(message, m.Halt) and message.generation == self.generation_told:
            self.halt = message
        elif isinstance(message, m.KvValue) and message.generation == self._values_of:
            self._values[message.key] = message.value

    def close(self, reason: str) -> None:
        """The agent is gone: every wait ends."""
        with self._changed:
            self.gone = self.gone or reason
            self._changed.notify_all()

    # --- the training thread ---------------------------------------------------------------------------------------

    @property
    def generation_told(self) -> Generation:
        """The newest generation this worker has heard of."""
        return self.fence.generation if self.fence is not None else 0

    def fenced(self, generation: Generation) -> bool:
        """Whether *generation* has ended."""
        return self.generation_told > generation

    def require(self, generation: Generation) -> None:
        """Fenced if *generation* has ended."""
        if self.fenced(generation):
            raise Fenced(f"generation {generation} ended, {self.generation_told} has begun")

    def wait(self, generation: Generation, get: Callable[[], T | None], timeout_s: float | None = None) -> T:
        """Wait until *get* gives something. Fenced when *generation* ends first, PeerUnreachable at the time-out or when the agent is gone."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self.require(generation)
                value = get()
                if value is not None:
                    return value
                self._require_company()
                left = POLL_S if end is None else end - time.monotonic()
                if left <= 0:
                    raise PeerUnreachable(f"no answer within {timeout_s:g} s")
                self._changed.wait(min(left, POLL_S))

    def wait_fenced(self, generation: Generation, timeout_s: float) -> bool:
        """Whether *generation* ends within *timeout_s* seconds."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self.fenced(generation) and time.monotonic() < end and not self.gone and self.finish is None:
                self._changed.wait(min(POLL_S, max(0.0, end - time.monotonic())))
            return self.fenced(generation)

    def _require_company(self) -> None:
        if self.finish is not None:
            raise SystemExit(self.finish.exit_code)
        if self.gone:
            raise PeerUnreachable(self.gone)

    def grants(self) -> int:
        """How often memory was granted so far."""
        return self._grants

    def value(self, key: str) -> bytes | None:
        """A rendezvous value that has arrived."""
        return self._values.get(key)


class AgentRendezvous:
    """The rendezvous of one generation, by way of the agent."""

    def __init__(self, link: WorkerLink, mailbox: Mailbox, generation: Generation) -> None:
        """For ``Groups.connect``."""
        self._link = link
        self._mailbox = mailbox
        self._generation = generation

    def set(self, key: str, value: bytes) -> None:
        """Publish *value*."""
        self._link.send(m.KvSet(generation=self._generation, key=key, value=value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the value; Fenced if the generation ends, PeerUnreachable after *timeout_s* seconds."""
        with self._mailbox.lock:
            value = self._mailbox.value(key)
        if value is not None:
            return value
        self._link.send(m.KvGet(generation=self._generation, key=key))
        return self._mailbox.wait(self._generation, lambda: self._mailbox.value(key), timeout_s)
