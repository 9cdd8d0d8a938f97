"""``hotswap classify``: reads logs, says what broke. Exit code 0 whatever the verdict; 2 if nothing could be read."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from hotswap.diagnosis.cause import RuleBook, diagnose
from hotswap.diagnosis.history import load, save
from hotswap.diagnosis.lint import report
from hotswap.diagnosis.policy import History, decide
from hotswap.diagnosis.readers import read_paths
from hotswap.diagnosis.show import as_json, as_text
from hotswap.diagnosis.table import RULES
from hotswap.diagnosis.user_rules import load_rules
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR, UsageError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hotswap classify",
        description="Says what broke a training: verdict, culprit, what to do, and the lines that decided.",
    )
    parser.add_argument("paths", nargs="*", metavar="FILE", help="log files or directories of one failure; - is stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--rules", type=Path, metavar="FILE", help="your own rules (JSON), tried before hotswap's")
    parser.add_argument("--history", type=Path, metavar="FILE", help="remember faults of nodes and the quarantine here")
    parser.add_argument(
        "--lint-rules", action="store_true", help="only check the rules: which can never apply, which overlap"
    )
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    return parser


def main(argv: list[str]) -> int:
    """Entry point of ``hotswap classify``; the exit code."""
    arguments = _parser().parse_args(argv)
    rules = (*(load_rules(arguments.rules) if arguments.rules else ()), *RULES)
    if arguments.lint_rules:
        problems = report(rules)
        print("\n".join(problems) or f"{len(rules)} rules, no problems")
        return EXIT_USER_ERROR if problems else EXIT_OK
    if not arguments.paths and sys.stdin.isatty():
        raise UsageError("name a log file or a directory, or pipe a log in")
    book = RuleBook(rules)
    diagnosis = diagnose(read_paths(arguments.paths or ["-"], book=book), book=book)
    history = load(arguments.history) if arguments.history else History()
    decision = decide(diagnosis, history, time.time())
    if arguments.history:
        save(decision.history, arguments.history)
    if arguments.json:
        print(json.dumps(as_json(diagnosis, decision), indent=2))
        return EXIT_OK
    colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(as_text(diagnosis, decision, colour=colour, width=shutil.get_terminal_size((120, 24)).columns))
    return EXIT_OK
