"""Virtual time, one heap of things to do, one source of chance: the same seed gives the same run, to the last line."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

EVENTS_MAX = 400_000


class Timer:
    """Something that will be done unless it is cancelled."""

    __slots__ = ("call", "cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        """*call* is made when the time has come."""
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        """Don't."""
        self.cancelled = True


class World:
    """Clock (seconds), agenda, dice and transcript."""

    def __init__(self, seed: int) -> None:
        """Everything random comes from *seed*."""
        self.dice = random.Random(seed)
        self.now = 0.0
        self.transcript: list[str] = []
        self.events = 0
        self.over = False
        self._agenda: list[tuple[float, int, Timer]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call later."""
        return self.at(self.now + delay_s, call, *args)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call at a certain time; of two at the same time the one that was asked for first comes first."""
        timer = Timer(lambda: call(*args)) if args else Timer(call)
        self._count += 1
        heapq.heappush(self._agenda, (when, self._count, timer))
        return timer

    def between(self, low: float, high: float) -> float:
        """A random number."""
        return self.dice.uniform(low, high)

    def chance(self, probability: float) -> bool:
        """A weighted coin."""
        return self.dice.random() < probability

    def note(self, text: str) -> None:
        """One line of the transcript."""
        self.transcript.append(f"{self.now:9.4f}  {text}")

    def run(self, until_s: float) -> None:
        """Do what is due, in order, until the job is over or *until_s* is reached."""
        while self._agenda and not self.over and self._agenda[0][0] <= until_s:
            due, _, timer = heapq.heappop(self._agenda)
            if timer.cancelled:
                continue
            self.events += 1
            assert self.events < EVENTS_MAX, f"{self.events} events: the simulation runs in circles"
            self.now = due
            timer.call()


class Pipe:
    """One direction of a connection: in order, delayed, and what is under way when it is cut may be lost."""

    def __init__(self, world: World, delay_s: tuple[float, float], deliver: Callable[[Any], None]) -> None:
        """Delays are drawn from the range *delay_s*."""
        self._world = world
        self._delay_s = delay_s
        self._deliver = deliver
        self._last = 0.0
        self._under_way: list[Timer] = []
        self.cut_off = False
        self.stalled_to = 0.0

    def send(self, message: Any) -> None:
        """Deliver *message* after everything that was sent before."""
        if self.cut_off:
            return
        world = self._world
        self._last = max(self._last, world.now + world.between(*self._delay_s), self.stalled_to)
        # At that very time, not after the difference: rounding would let two messages change places.
        self._under_way.append(world.at(self._last, self._arrive, message))

    def _arrive(self, message: Any) -> None:
        del self._under_way[0]
        self._deliver(message)

    def cut(self, *, keep_all: bool = False) -> float:
        """End it; a random number of the last messages is lost unless *keep_all*. Seconds until the last one arrives."""
        self.cut_off = True
        kept = len(self._under_way) if keep_all else self._world.dice.randint(0, len(self._under_way))
        for timer in self._under_way[kept:]:
            timer.cancel()
        del self._under_way[kept:]
        return max(0.0, self._last - self._world.now) if kept else 0.0
