"""Cuts a log into incidents: what came before the training visibly went on is history, not the cause of how it ended.

A long log holds failures that were survived: a restart after a lost peer, a download that worked at the third try. The oldest
of them would otherwise always win, since of equally strong causes the first is the root.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from hotswap.diagnosis.model import Blames, Finding, Strength, Verdict

STEPS_SURVIVED = 5
"""Steps that a program must make after a complaint for it to have been survived. Ranks that wait for a dead one make one or
two at most."""

_SAID_BY_PROGRAMS = frozenset({Blames.CODE, Blames.NOBODY, Blames.PEER, Blames.RANK, Blames.STORAGE})


def split(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(the last incident, what came before it), both in order. Without anything wrong in the end, all is one incident."""
    steps = _positions(findings, "progress")
    past = _before_restart(findings, steps) | _survived(findings, steps)
    return (
        [finding for index, finding in enumerate(findings) if index not in past],
        [finding for index, finding in enumerate(findings) if index in past],
    )


def _positions(findings: Sequence[Finding], kind: str) -> dict[str, list[int]]:
    """For each source, where in the order it has observations of *kind*."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, finding in enumerate(findings):
        if finding.evidence.kind == kind:
            found[finding.evidence.source].append(index)
    return found


def _last_trouble(findings: Sequence[Finding]) -> int:
    return max((index for index, finding in enumerate(findings) if finding.rule), default=-1)


def _before_restart(findings: Sequence[Finding], steps: dict[str, list[int]]) -> set[int]:
    """All that came before the last restart after which steps were made, and something went wrong again."""
    trouble = _last_trouble(findings)
    cut = -1
    for source, restarts in _positions(findings, "restart").items():
        done = steps.get(source, [])
        for restart in restarts:
            after = bisect_right(done, restart)
            if after < len(done) and done[after] < trouble:
                cut = max(cut, restart)
    if cut < 0:
        return set()
    source = findings[cut].evidence.source
    return {
        index
        for index, finding in enumerate(findings[:cut])
        if finding.evidence.source == source or finding.evidence.time is not None
    }


def _survived(findings: Sequence[Finding], steps: dict[str, list[int]]) -> set[int]:
    """What a program said and then went on for several steps, before something else went wrong."""
    trouble = _last_trouble(findings)
    past = set()
    for index, finding in enumerate(findings):
        done = steps.get(finding.evidence.source, [])
        last = bisect_right(done, index) + STEPS_SURVIVED - 1
        if last < len(done) and done[last] < trouble and _may_be_survived(finding):
            past.add(index)
    return past


def _may_be_survived(finding: Finding) -> bool:
    """Hardware stays broken while the program goes on, and bad numbers stay bad."""
    return (
        bool(finding.rule)
        and finding.strength < Strength.PROOF
        and finding.verdict is not Verdict.NUMERICAL
        and finding.blames in _SAID_BY_PROGRAMS
    )
