"""How long this worker's own parts of a step take: those in which it waits for nobody.

``script``: from the beginning of the attempt to the first operation in any process group, as the host sees it (data, and forward and
backward up to there). ``update``: from the commit gate to the end of the attempt; on a GPU as the device sees it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

SCRIPT, UPDATE = "script", "update"
SAMPLES = 8
SAMPLES_MIN = 5
LOOK_S = 0.002
"""How often it is looked whether an operation has started; less often where that takes long anyway."""
LOOKS = 50
"""A part is measured in so many looks, about."""


class Tempo:
    """Called by the thread that trains, but for ``parts_s``, which the reporting thread calls."""

    def __init__(self, started: Callable[[], int], every_s: float, *, on_device: bool) -> None:
        """*started*: operations started so far in all groups. *every_s*: the script's part is measured that often, at most."""
        self._started = started
        self._every_s = every_s
        self._on_device = on_device
        self._lock = threading.Lock()
        self._samples: dict[str, deque[float]] = {part: deque(maxlen=SAMPLES) for part in (SCRIPT, UPDATE)}
        self._measured_at = 0.0
        self._look = threading.Event()
        self._attempt = 0
        self._begun: tuple[int, int, float] | None = None
        self._update_at: Any = None
        self._on_the_way: deque[tuple[Any, Any]] = deque(maxlen=SAMPLES)
        threading.Thread(target=self._run, name="hotswap-tempo", daemon=True).start()

    def restart(self) -> None:
        """Another generation: the first steps of it are not like others."""
        with self._lock:
            for samples in self._samples.values():
                samples.clear()
            self._on_the_way.clear()
        self._begun = self._update_at = None

    def begin(self) -> None:
        """An attempt begins."""
        self._attempt += 1
        now = time.monotonic()
        if now - self._measured_at >= self._every_s:
            self._measured_at = now
            self._begun = (self._attempt, self._started(), now)
            self._look.set()

    def update(self) -> None:
        """The gate is passed, the update begins."""
        if self._update_at is None:
            self._update_at = self._mark()

    def end(self) -> None:
        """The update is done, as far as the host is concerned."""
        self._attempt += 1
        begun, self._update_at = self._update_at, None
        if begun is None:
            return
        with self._lock:
            if self._on_device:
                self._on_the_way.append((begun, self._mark()))
            else:
                self._samples[UPDATE].append(self._mark() - begun)

    def parts_s(self) -> dict[str, float]:
        """Medians of the parts that were measured often enough, in seconds."""
        with self._lock:
            while self._on_the_way and self._on_the_way[0][1].query():
                begun, ended = self._on_the_way.popleft()
                self._samples[UPDATE].append(begun.elapsed_time(ended) / 1000)
            return {
                part: statistics.median(samples)
                for part, samples in self._samples.items()
                if len(samples) >= SAMPLES_MIN
            }

    def _mark(self) -> Any:
        if not self._on_device:
            return time.monotonic()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            begun = self._begun
            if begun is not None:
                self._measure(*begun)

    def _measure(self, attempt: int, before: int, began: float) -> None:
        """Look until an operation has started; an attempt that ends without one had no such part."""
        never = threading.Event()
        with self._lock:
            usual_s = statistics.median(self._samples[SCRIPT]) if self._samples[SCRIPT] else 0.0
        pause_s = max(LOOK_S, usual_s / LOOKS)
        while self._attempt == attempt:
            if self._started() != before:
                with self._lock:
                    if self._begun is not None and self._begun[0] == attempt:
                        self._samples[SCRIPT].append(time.monotonic() - began)
                return
            never.wait(pause_s)
