"""How many steps apart snapshots are: every step, unless replicas take longer to their holders than that.

A slot whose replica is late waits for it before it overwrites the snapshot before. With snapshots *k* steps apart a replica has
``k - 1`` whole steps and the part of a step up to the commit gate to arrive in. Every slot proposes the smallest *k* at which its
own waiting stays within the limit; the commit gate, which all pass, tells all of them the largest. What a copy costs the device
counts as well, once in *k* steps: it may have to wait with its update until the copy of its state is done, and kernels that run
beside a copy share the device's memory with it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

INTERVAL_MAX = 64
SAMPLES = 8
"""Medians are of so many: one slow step, or one late replica, changes nothing."""
SAMPLES_MIN = 3
COPY_SHARE = 0.025
"""Of the time that a copy takes, the steps beside it are longer by so much: 1 to 2 ms for 3.6 GB, which take 66 ms, on an H200.
Measured (docs/performance.md, Overhead on GPUs); too little to be seen in a few steps of a training that is not a benchmark."""
PATIENCE = 16
"""So many proposals in a row must be smaller before the interval shrinks: going back and forth would help nobody."""


class Pace:
    """One slot's measurements and what follows from them. Times in seconds."""

    def __init__(self, *, minimum: int, limit: float) -> None:
        """*minimum*: steps between snapshots, at least. *limit*: share of the time that it may cost; 0: any."""
        self.minimum = minimum
        self.limit = limit
        self.interval = minimum
        self._steps: deque[float] = deque(maxlen=SAMPLES)
        self._leads: deque[float] = deque(maxlen=SAMPLES)
        self._latencies: deque[float] = deque(maxlen=SAMPLES)
        self._copies: deque[float] = deque(maxlen=SAMPLES)
        self._smaller = 0

    def restart(self) -> None:
        """A new generation, in which a replacement knows nothing of the interval that was agreed on."""
        self.interval = self.minimum
        self._smaller = 0

    def note_step(self, duration_s: float, lead_s: float) -> None:
        """A step without its waiting for replicas, and the part of it before the gate."""
        self._steps.append(duration_s)
        self._leads.append(lead_s)

    def note_latency(self, latency_s: float) -> None:
        """From the begin of a snapshot to its acknowledgement."""
        self._latencies.append(max(0.0, latency_s))

    def note_copy(self, copy_s: float, stall_s: float) -> None:
        """How long the copy of a snapshot took, and how much of that the device only waited for it."""
        self._copies.append(stall_s + COPY_SHARE * (copy_s - stall_s))

    def proposal(self) -> int:
        """Smallest interval at which protection costs this slot no more than the limit allows."""
        if not self.limit or min(len(self._steps), len(self._latencies)) < SAMPLES_MIN:
            return self.interval
        step, lead = statistics.median(self._steps), statistics.median(self._leads)
        late = statistics.median(self._latencies) - lead
        # Waiting late - (k - 1) * step once in k steps must not exceed limit * k * step.
        needed = math.ceil((late + step) / (step * (1 + self.limit))) if late > self.limit * step else 1
        copied = math.ceil(statistics.median(self._copies) / (step * self.limit)) if self._copies else 1
        wanted = min(max(needed, copied, self.minimum), INTERVAL_MAX)
        if wanted >= self.interval:
            self._smaller = 0
            return wanted
        self._smaller += 1
        return self.interval if self._smaller < PATIENCE else wanted

    def agree(self, interval: int) -> bool:
        """Take the interval that all slots have been told; whether it is another one."""
        changed = interval != self.interval
        self.interval = interval
        if changed:
            self._smaller = 0
        return changed
