"""Writes docs/failures.md from the rule table: for each verdict, what users see, what it means and what is done.

``python -m hotswap.diagnosis.docs [--check] [FILE]``; with ``--check`` it only says whether the file is up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from hotswap.diagnosis.model import CONFIDENT, Strength, Verdict
from hotswap.diagnosis.policy import LADDERS, Action
from hotswap.diagnosis.rule import Case, Fact, Rule, Text
from hotswap.diagnosis.table import RULES
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR

DEFAULT = Path("docs/failures.md")
SEEN_MAX = 110

MEANING: dict[Verdict, str] = {
    Verdict.NODE_FAULT: "Hardware, driver or a service of one node is broken. Other nodes are fine; this one fails again.",
    Verdict.PROCESS_FAULT: "One process broke; its node is probably fine. A new process is started there.",
    Verdict.TRANSIENT: "It passes by itself. Trying again is right, and counting.",
    Verdict.USER_ERROR: "The program, its input or its configuration. It fails again on every node, so nothing is retried.",
    Verdict.STORAGE: "A file system, a disk or a stored file. Neither the code nor a GPU.",
    Verdict.OOM_GPU: "The program needs more memory than the GPU has. The same configuration fails again.",
    Verdict.OOM_HOST: "The host or the container ran out of memory, /dev/shm included.",
    Verdict.PREEMPTION: "The scheduler or provider took the nodes, or the time was up. Nothing is broken.",
    Verdict.NUMERICAL: "The training's own numbers went wrong.",
    Verdict.UNKNOWN: "Only consequences were seen, or one of several causes. The careful action: restart once with a health check.",
}

DOES: dict[Action, str] = {
    Action.CONTINUE: "goes on",
    Action.RETRY: "goes on from the resume step with the same nodes",
    Action.RESPAWN: "starts the process anew on its node",
    Action.CHECK: "restarts, and trusts suspected nodes only after a health check",
    Action.REPLACE: "puts a spare in the node's place and keeps the node out",
    Action.ROLL_BACK: "goes back to the checkpoint before",
    Action.REQUEUE: "saves and requeues",
    Action.STOP: "stops with a report",
}

HEAD = """# What breaks, and what hotswap does about it

Generated from the rule table by `python -m hotswap.diagnosis.docs`; do not edit.

`hotswap classify FILE…` reads logs (rank logs, launcher logs, kernel logs, scheduler output; files, directories or standard
input) and names the verdict, the culprit, the action and the lines that decided. Rules are tried from top to bottom within a
line; over all lines the strongest finding that nothing explains is the root, the first of equally strong ones. A verdict with a
confidence below {confident} is a best guess: it never costs a node at the first time. Rules of your own (`--rules FILE`) are
tried before these.

Strengths: *proof* (hardware, kernel or scheduler says it), *cause* (program or library says it), *symptom* (one of several
causes), *context* (counts only if nothing else was seen), *echo* (follows from something else, never a cause).

Every rule links a public page: a manual, a thread or a file. A rule whose link has not the form of one is refused by the linter
(`python -m pytest tests/diagnosis/test_rules.py`). That the page says so was looked up for NVIDIA's catalog of Xid codes, the
codes of HIP and HSA, Ascend's page on time-outs, and every thread and file on GitHub but two, which a search did not find
(LlamaFactory#3839, vllm-ascend#3413); the other manuals were not looked up again.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(confident=CONFIDENT)]
    for verdict in Verdict:
        rules = [rule for rule in RULES if rule.verdict is verdict]
        parts.append(f"## {verdict.value}\n\n{MEANING[verdict]}\n\nhotswap {_ladder(verdict)}.\n")
        parts.append("| rule | what is seen | what it means | strength | confidence | source |")
        parts.append("| --- | --- | --- | --- | --- | --- |")
        parts += [_row(rule) for rule in rules]
        parts.append("")
    return "\n".join(parts)


def _ladder(verdict: Verdict) -> str:
    steps = [DOES[action] for action in LADDERS[verdict]]
    return "; when it comes back, ".join(dict.fromkeys(steps))


def _row(rule: Rule) -> str:
    strength = rule.strength.name.lower() if isinstance(rule.strength, Strength) else ""
    return (
        f"| `{rule.id}` | {_seen(rule)} | {_cell(rule.reason)} | {strength} | {rule.confidence:.2f} "
        f"| [link]({rule.source}) |"
    )


def _seen(rule: Rule) -> str:
    if isinstance(rule.when, Text):
        return f"text `{_cell(_short(rule.when.pattern))}`"
    if isinstance(rule.when, Fact):
        where = ", ".join(f"{name} {_want(want)}" for name, want in rule.when.where.items())
        return f"{rule.when.kind.replace('_', ' ')} {where}".strip()
    assert isinstance(rule.when, Case)
    return "all findings together"


def _want(want: object) -> str:
    if isinstance(want, range):
        return f"from {want.start}" + ("" if want.stop > 1 << 40 else f" to {want.stop - 1}")
    if isinstance(want, tuple):
        shown = ", ".join(str(one) for one in want[:6])
        return f"{shown}, …" if len(want) > 6 else shown
    return str(want)


def _short(pattern: str) -> str:
    return pattern if len(pattern) <= SEEN_MAX else pattern[: SEEN_MAX - 1] + "…"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("`", "'")


def main(argv: list[str] | None = None) -> int:
    """Writes the page or checks it; the exit code says whether it was up to date."""
    parser = argparse.ArgumentParser(prog="python -m hotswap.diagnosis.docs")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    now = page()
    if arguments.check:
        fresh = arguments.file.is_file() and arguments.file.read_text(encoding="utf-8") == now
        print(f"{arguments.file} is {'up to date' if fresh else 'stale'}")
        return EXIT_OK if fresh else EXIT_USER_ERROR
    arguments.file.write_text(now, encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
