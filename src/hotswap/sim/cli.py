"""``hotswap simulate``: the jobs of many seeds, with faults, checked against every promise of the protocol."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from hotswap.errors import EXIT_OK, EXIT_USER_ERROR
from hotswap.sim.chronicle import Violation
from hotswap.sim.job import JobModel
from hotswap.sim.world import World

SPOILT: dict[str, dict[str, Any]] = {
    "one-version": {"versions": 1, "durable_steps": 0, "integrity": 0},
    "no-gate": {"gate": False, "durable_steps": 0, "integrity": 0},
    # An acknowledgement that waits for one of two holders only.
    "first-holder": {"all_holders": False, "durable_steps": 0, "integrity": 0, "replicas": 2},
    "no-checksums": {"checked": False, "durable_steps": 0, "integrity": 0, "faults": 12},
    # A node must miss a plan, be back before the next and be needed then.
    "keep-undone": {
        "drop_undone": False,
        "durable_steps": 0,
        "integrity": 0,
        "faults": 14,
        "replicas": 1,
        "coordinators": 1,
        "nodes_active": 3,
        "spares": 4,
        "width": 1,
    },
    # Who gives a place away frees what all agreed on last, although it is not known yet whether they still do.
    "free-agreed": {"keep_agreed": False, "durable_steps": 0, "integrity": 1, "faults": 6},
    # Snapshots and replicas of slots that the job had when it had another number of them.
    "keep-resized": {
        "drop_resized": False,
        "durable_steps": 3,
        "integrity": 0,
        "coordinators": 1,
        "nodes_active": 4,
        "spares": 0,
        "nodes_min": 1,
        "spare_wait_s": 0.5,
    },
    # A coordinator that goes on leading although its lease has run out.
    "no-lease": {"lease": False, "coordinators": 2},
}
"""Ways to spoil the protocol, each of which the checkers must find. Without durable checkpoints, which would hide some."""
BATCH = 25
"""Seeds that a process is given at a time."""
TRANSCRIPTS_MAX = 3
"""So many failing seeds are printed in full; any other one can be replayed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one seed. ``violation`` is empty if every promise was kept; only then is there no transcript."""

    seed: int
    violation: str
    exit_code: int
    events: int
    recoveries: int
    faults: Counter[str]
    transcript: tuple[str, ...]


class _Scribe(logging.Handler):
    """What production code logs belongs into the transcript."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _scribe(world: World) -> Iterator[None]:
    logger, scribe = logging.getLogger("hotswap"), _Scribe(world)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(scribe)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(scribe)
        logger.setLevel(level)
        logger.propagate = propagate


def simulate(seed: int, *, with_transcript: bool = False, **spoilt: Any) -> Outcome:
    """Run one seed. *spoilt*: fields of ``setup.Setup`` that are not left to chance."""
    job, violation = JobModel(seed, **spoilt), ""
    with _scribe(job.world):
        try:
            job.run()
        except (Violation, AssertionError) as error:
            violation = str(error) or repr(error)
            job.world.note(f"VIOLATION: {violation}")
    return Outcome(
        seed=seed,
        violation=violation,
        exit_code=job.exit.exit_code if job.exit is not None else -1,
        events=job.world.events,
        recoveries=max(0, len(job.chronicle.planned) - 1),
        faults=job.saboteur.struck,
        transcript=tuple(job.world.transcript) if violation or with_transcript else (),
    )


def _batch(seeds: Sequence[int], with_transcript: bool, spoilt: dict[str, Any]) -> list[Outcome]:
    return [simulate(seed, with_transcript=with_transcript, **spoilt) for seed in seeds]


def simulate_all(seeds: Sequence[int], *, jobs: int, with_transcript: bool = False, **spoilt: Any) -> Iterator[Outcome]:
    """Outcomes in the order of *seeds*, from *jobs* processes."""
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    if jobs <= 1 or len(batches) <= 1:
        for batch in batches:
            yield from _batch(batch, with_transcript, spoilt)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for outcomes in pool.map(_batch, batches, [with_transcript] * len(batches), [spoilt] * len(batches)):
            yield from outcomes


def seeds_of(text: str) -> range:
    """``7`` or ``A:B``, without B."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if every seed kept every promise, else 1."""
    parser = argparse.ArgumentParser(prog="hotswap simulate", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=seeds_of, default=range(100), help="A:B, without B (0:100), or a single one")
    which.add_argument("--seed", type=int, help="replay this one, with its transcript")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one for each CPU)")
    parser.add_argument("--faults", type=int, help="so many in each job (else 1 to 4)")
    parser.add_argument("--spoil", choices=SPOILT, help="leave out a part of the protocol, to see what it is for")
    parser.add_argument("--json", action="store_true", help="one line of JSON; transcripts go to standard error")
    options = parser.parse_args(argv)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    spoilt = dict(SPOILT[options.spoil]) if options.spoil else {}
    if options.faults is not None:
        spoilt["faults"] = options.faults
    began, total = time.monotonic(), _Total()
    for outcome in simulate_all(seeds, jobs=options.jobs, with_transcript=options.seed is not None, **spoilt):
        if outcome.transcript and len(total.failed) < TRANSCRIPTS_MAX:
            print("\n".join(outcome.transcript), file=sys.stderr if options.json else sys.stdout)
        total.add(outcome)
    result = total.result(len(seeds), time.monotonic() - began)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
        extra = "".join(f" --{name} {value}" for name in ("spoil", "faults") if (value := getattr(options, name)))
        for seed in total.failed:
            print(f"replay: hotswap simulate --seed {seed}{extra}")
    return EXIT_USER_ERROR if total.failed else EXIT_OK


class _Total:
    def __init__(self) -> None:
        self.failed: dict[int, str] = {}
        self._exits: Counter[int] = Counter()
        self._faults: Counter[str] = Counter()
        self._recoveries = self._events = 0

    def add(self, outcome: Outcome) -> None:
        self._exits[outcome.exit_code] += 1
        self._faults += outcome.faults
        self._recoveries += outcome.recoveries
        self._events += outcome.events
        if outcome.violation:
            self.failed[outcome.seed] = outcome.violation

    def result(self, count: int, seconds: float) -> dict[str, Any]:
        return {
            "seeds": count,
            "failed": {str(seed): violation for seed, violation in self.failed.items()},
            "exit_codes": {str(code): number for code, number in sorted(self._exits.items())},
            "faults": dict(sorted(self._faults.items())),
            "recoveries": self._recoveries,
            "events": self._events,
            "seconds": round(seconds, 2),
            "seeds_per_minute": round(60 * count / max(seconds, 1e-9)),
        }
