"""``hotswap chaos``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from hotswap.chaos import matrix, suite
from hotswap.chaos.network import obstacle
from hotswap.chaos.servers import ForkServers
from hotswap.demo.report import versions
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR

WIDTH = 150


def main(argv: Sequence[str]) -> int:
    """Entry point of ``hotswap chaos``: 0 if every job came out as it has to, 1 if not, 2 for wrong options.

    Jobs that cannot be run on this machine count for neither.
    """
    parser = argparse.ArgumentParser(
        prog="hotswap chaos",
        description="Run small real trainings on this machine, break something in each, and compare with the undisturbed run, bit for bit.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("list", help="the faults and the layouts")
    run = commands.add_parser("run", help="run the matrix", allow_abbrev=False)
    run.add_argument("--suite", choices=("fast", "full"), default="fast", help="fast: some faults, each on one layout")
    run.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT")
    run.add_argument("--faults", nargs="+", default=[], metavar="FAULT")
    run.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    run.add_argument("--html", type=Path, help="also write the table to this file")
    run.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and evidence of all jobs here")
    args = parser.parse_args(argv)
    if args.command == "list":
        return _list()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(args)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: object) -> NoReturn:
    """As Ctrl-C: what was started and made is taken away first."""
    raise KeyboardInterrupt


def _list() -> int:
    console = Console(width=WIDTH)
    faults = Table("faults", "", "needs")
    for name, drill in suite.DRILLS.items():
        faults.add_row(name, drill.what, drill.needs)
    console.print(faults)
    layouts = Table("layouts", "")
    for name, program in suite.LAYOUTS.items():
        layouts.add_row(name, f"{program.train.layout}, {program.nodes} nodes of {program.width}")
    console.print(layouts)
    if reason := obstacle(True):
        console.print(f"Faults of the network are skipped here: {reason}.", highlight=False, soft_wrap=True)
    return EXIT_OK


def _run(args: argparse.Namespace) -> int:
    cells = suite.cells(args.suite, args.layouts, args.faults)
    screen = Console(width=WIDTH, quiet=args.json)
    with tempfile.TemporaryDirectory(prefix="hotswap-chaos-") as temporary:
        directory = args.keep or Path(temporary)
        servers = ForkServers(Path(temporary))
        with contextlib.closing(servers):
            runner = matrix.Matrix(directory.resolve(), servers, keep=args.keep is not None)
            outcomes = runner.measure(cells, lambda outcome: screen.print(_line(outcome), highlight=False))
    table = _table(outcomes)
    screen.print(table)
    if args.html:
        recorder = Console(width=WIDTH, record=True, file=io.StringIO())
        recorder.print(table)
        args.html.write_text(recorder.export_html())
    if args.json:
        print(json.dumps(matrix.as_json(outcomes, versions())))
    return EXIT_USER_ERROR if any(outcome.bad for outcome in outcomes) else EXIT_OK


def _line(outcome: matrix.Outcome) -> str:
    return f"{outcome.drill} on {outcome.layout}: {outcome.outcome} {outcome.detail} ({outcome.seconds:.0f} s)"


def _table(outcomes: Sequence[matrix.Outcome]) -> Table:
    good, bad = sum(outcome.good for outcome in outcomes), sum(outcome.bad for outcome in outcomes)
    skipped = len(outcomes) - good - bad
    title = f"{good} of {good + bad} jobs came out as they have to" + (f", {skipped} were skipped" if skipped else "")
    table = Table(title=title, title_justify="left")
    numbers = ("recoveries", "longest, ms", "steps redone", "job, s")
    for name in ("fault", "layout", "outcome", *numbers[:3], "verdict", "right verdict", numbers[3]):
        table.add_column(name, justify="right" if name in numbers else "left")
    for outcome in outcomes:
        longest = "" if outcome.recovery_ms is None else f"{outcome.recovery_ms:.0f}"
        table.add_row(
            outcome.drill,
            outcome.layout,
            f"[{_colour(outcome)}]{outcome.outcome}[/] {'' if outcome.good else outcome.detail[:60]}",
            str(outcome.recoveries),
            longest,
            str(outcome.redone),
            outcome.verdict,
            {True: "yes", False: "[red]no[/]", None: ""}[outcome.right_verdict],
            f"{outcome.seconds:.1f}",
        )
    return table


def _colour(outcome: matrix.Outcome) -> str:
    return "green" if outcome.good else "red" if outcome.bad else "yellow"
