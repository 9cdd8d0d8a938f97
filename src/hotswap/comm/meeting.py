"""The rendezvous of one generation, as the transport adapters see it."""

from __future__ import annotations

import threading
import time

from hotswap.comm.port import Rendezvous
from hotswap.core.types import Generation, Slot
from hotswap.errors import Fenced, PeerUnreachable


class DeadlineMeeting:
    """Adds the generation to the keys, a deadline to the waits, and a way out when the generation ends."""

    def __init__(
        self, rendezvous: Rendezvous, *, generation: Generation, slot: Slot, timeout_s: float, stop: threading.Event
    ) -> None:
        """*stop* is the process' stop flag."""
        self._rendezvous = rendezvous
        self._generation = generation
        self._slot = slot
        self._deadline = time.monotonic() + timeout_s
        self._stop = stop
        self._patience_s: float | None = None
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Slot], _Pending] = {}

    @property
    def slot(self) -> Slot:
        """This process' slot."""
        return self._slot

    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        if self._patience_s is not None:
            return self._patience_s
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise Fenced when the generation has ended meanwhile."""
        if self._stop.is_set():
            raise Fenced(f"generation {self._generation} ended while connecting its groups; wait for the next one")

    def publish(self, topic: str, value: bytes) -> None:
        """Tell the other slots this slot's *value*."""
        self._rendezvous.set(self._key(topic, self._slot), value)

    def lookup(self, topic: str, slot: Slot) -> bytes:
        """Another slot's value; asked for once, however many threads want it."""
        with self._lock:
            pending = self._values.get((topic, slot))
            first = pending is None
            if pending is None:
                pending = self._values[(topic, slot)] = _Pending()
        if first:
            self._fetch(topic, slot, pending)
        if not pending.ready.wait(self.remaining_s()):
            raise PeerUnreachable(f"slot {slot} published no addresses for generation {self._generation} in time")
        if pending.error is not None:
            raise pending.error
        return pending.value

    def post(self, key: str, value: bytes) -> None:
        """Publish a value under a key of which it does not matter who sets it."""
        self._rendezvous.set(f"g{self._generation}/{key}", value)

    def read(self, key: str) -> bytes:
        """What somebody has posted."""
        self.check()
        return self._rendezvous.get(f"g{self._generation}/{key}", self.remaining_s())

    def later(self, timeout_s: float) -> DeadlineMeeting:
        """The same, with a deadline *timeout_s* after the begin of each wait."""
        meeting = DeadlineMeeting(
            self._rendezvous, generation=self._generation, slot=self._slot, timeout_s=timeout_s, stop=self._stop
        )
        meeting._patience_s = timeout_s
        return meeting

    def _fetch(self, topic: str, slot: Slot, pending: _Pending) -> None:
        try:
            self.check()
            pending.value = self._rendezvous.get(self._key(topic, slot), self.remaining_s())
        except Exception as error:
            pending.error = error
        finally:
            pending.ready.set()

    def _key(self, topic: str, slot: Slot) -> str:
        return f"g{self._generation}/{topic}/{slot}"


class _Pending:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.value = b""
        self.error: Exception | None = None
