"""Virtual time, one heap of things to do, one source of chance: the same seed gives the same run, to the last line."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

EVENTS_MAX = 400_000


class Timer:
    """Something that will be done unless it is cancelled."""

    __slots__ = ("_cancelled", "args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """*call* is made with *args* when the time has come."""
        self.call = call
        self.args = args
        self._cancelled = False

    def cancel(self) -> None:
        """Don't."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Whether it will not be done."""
        return self._cancelled


class World:
    """Clock (seconds), agenda, dice and transcript."""

    def __init__(self, seed: int) -> None:
        """Everything random comes from *seed*."""
        self.dice = random.Random(seed)
        self.now = 0.0
        self.transcript: list[str] = []
        self.events = 0
        self.over = False
        self.failure: BaseException | None = None
        self._agenda: list[tuple[float, int, Timer]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call later."""
        return self.at(self.now + delay_s, call, *args)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call at a certain time; of two at the same time the one that was asked for first comes first."""
        timer = Timer(call, args)
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

    def fail(self, error: BaseException) -> None:
        """Something is wrong; said where an exception would be caught, or come too late."""
        self.failure = self.failure or error
        self.over = True

    def run(self, until_s: float) -> None:
        """Do what is due, in order, until the job is over or *until_s* is reached. Raises what has failed."""
        while self._agenda and not self.over and self._agenda[0][0] <= until_s:
            due, _, timer = heapq.heappop(self._agenda)
            if timer.cancelled():
                continue
            self.events += 1
            assert self.events < EVENTS_MAX, f"{self.events} events: the simulation runs in circles"
            self.now = due
            timer.call(*timer.args)
        if self.failure is not None:
            raise self.failure
