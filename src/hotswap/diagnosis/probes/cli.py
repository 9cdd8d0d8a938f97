"""``hotswap probe``: is this node healthy? Exit code 0 if nothing speaks against it, 1 if a probe failed."""

from __future__ import annotations

import argparse
import json

from hotswap.diagnosis.probes.runner import DEADLINE_S, available, run_probes
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR


def main(argv: list[str]) -> int:
    """Entry point of ``hotswap probe``; the exit code."""
    parser = argparse.ArgumentParser(prog="hotswap probe", description="Quick health checks of this node.")
    parser.add_argument("names", nargs="*", metavar="PROBE", help=f"default: all of {', '.join(available())}")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, metavar="S", help="seconds for each (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    results = run_probes(arguments.names or None, deadline_s=arguments.deadline)
    if arguments.json:
        rows = [
            {
                "name": one.name,
                "status": one.status.value,
                "detail": one.detail,
                "seconds": one.seconds,
                "measured": one.measured,
            }
            for one in results
        ]
        print(json.dumps({"ok": all(one.ok for one in results), "probes": rows}, indent=2))
    else:
        for one in results:
            print(f"{one.status.value:8} {one.name:16} {one.seconds:6.2f} s  {one.detail}")
    return EXIT_OK if all(one.ok for one in results) else EXIT_USER_ERROR
