"""How a modelled process runs: its main thread, a generator in virtual time, and what can be done to the process from outside."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Union

from hotswap.errors import PeerUnreachable
from hotswap.sim.world import Timer, World

FOREVER = 1e9
Yield = Union[float, Callable[[], object]]
"""For how long the thread is busy (seconds), or what it waits for."""
Thread = Generator[Yield, None, None]


class Execution:
    """One process's, from its start on."""

    def __init__(self, world: World, name: str, thread: Thread, on_end: Callable[[int], None]) -> None:
        """*on_end* gets the exit status when *thread* has come to its end, or failed for want of a peer."""
        self.alive = True
        self.frozen_to = 0.0
        self.stopped_since: float | None = None
        self.stuck = False
        """The thread does not go on; the process lives."""
        self._world = world
        self._name = name
        self._thread = thread
        self._on_end = on_end
        self._waiting: Callable[[], object] | None = None
        self._timer: Timer = world.after(0.0, self.advance)

    @property
    def waits(self) -> bool:
        """Whether the thread waits for something."""
        return self._waiting is not None

    def advance(self, error: Exception | None = None) -> None:
        """Run the thread until it is busy or waits. *error* is raised where it is."""
        if self.postponed(self.advance, error) or self.stuck:
            return
        self._waiting = None
        try:
            while self.alive:
                wanted = next(self._thread) if error is None else self._thread.throw(error)
                error = None
                if not callable(wanted):
                    self._timer = self._world.after(wanted, self.advance)
                    return
                if not wanted():
                    self._waiting = wanted
                    return
        except StopIteration:
            self._on_end(0)
        except PeerUnreachable as failure:
            self._world.note(f"{self._name}: {failure}")
            self._on_end(1)

    def poke(self) -> None:
        """Something has changed: see whether the thread can go on."""
        if self._waiting is None or self.stuck or self.postponed(self.poke):
            return
        if self._waiting():
            self.advance()

    def postponed(self, call: Callable[..., None], *args: Any) -> bool:
        """Whether *call* cannot be carried out now: it is made when the process goes on, or never."""
        if self.alive and self._world.now < self.frozen_to:
            self._world.at(self.frozen_to, call, *args)
            return True
        return not self.alive

    def freeze(self, seconds: float) -> None:
        """Stop all its threads for a while."""
        self.frozen_to = max(self.frozen_to, self._world.now + seconds)

    def stop(self) -> None:
        """SIGSTOP, for good."""
        self.frozen_to, self.stopped_since = FOREVER, self._world.now

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        self._timer.cancel()
