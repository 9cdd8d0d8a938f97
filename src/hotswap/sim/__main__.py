"""``python -m hotswap.sim --seeds A:B``: simulate the jobs of many seeds; a failing one prints its transcript."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

from hotswap.errors import EXIT_OK, EXIT_USER_ERROR
from hotswap.sim.chronicle import Violation
from hotswap.sim.job import JobModel

SPOILT: dict[str, dict[str, Any]] = {
    "one-version": {"versions": 1},
    "no-gate": {"gate": False},
    # Rarely found: a node must miss a plan, be back before the next and be needed then.
    "keep-undone": {"drop_undone": False, "faults": 8},
}
"""Ways to spoil the protocol, each of which the checkers must find."""


def simulate(seed: int, **spoilt: Any) -> tuple[JobModel, str]:
    """Run one seed; what it violated, if anything."""
    job = JobModel(seed, **spoilt)
    try:
        job.run()
    except (Violation, AssertionError) as error:
        job.world.note(f"VIOLATION: {error}")
        return job, str(error) or repr(error)
    return job, ""


def seeds_of(text: str) -> range:
    """``7`` or ``A:B``, without B."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if every seed kept every promise."""
    parser = argparse.ArgumentParser(prog="python -m hotswap.sim", description=__doc__)
    parser.add_argument(
        "--seeds", type=seeds_of, default=range(100), help="one seed, or A:B (B excluded); default 0:100"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    parser.add_argument("--transcript", action="store_true", help="print the transcripts of good seeds too")
    parser.add_argument("--spoil", choices=SPOILT, help="leave out a part of the protocol, to see what it is for")
    options = parser.parse_args(argv)
    spoilt = SPOILT[options.spoil] if options.spoil else {}
    began = time.monotonic()
    failed: dict[int, str] = {}
    exits: Counter[int] = Counter()
    events = faults = recoveries = 0
    for seed in options.seeds:
        job, violation = simulate(seed, **spoilt)
        events, faults = events + job.world.events, faults + job.saboteur.struck
        recoveries += max(0, len(job.chronicle.planned) - 1)
        exits[job.exit.exit_code if job.exit is not None else -1] += 1
        if violation:
            failed[seed] = violation
        if (violation or options.transcript) and not options.json:
            print("\n".join(job.world.transcript))
    result = {
        "seeds": len(options.seeds),
        "failed": {str(seed): violation for seed, violation in failed.items()},
        "exit_codes": {str(code): count for code, count in sorted(exits.items())},
        "faults": faults,
        "recoveries": recoveries,
        "events": events,
        "seconds": round(time.monotonic() - began, 2),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
        for seed in failed:
            print(f"replay: python -m hotswap.sim --seeds {seed}" + (f" --spoil {options.spoil}" if spoilt else ""))
    return EXIT_USER_ERROR if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
