"""From observations to an answer: what each means, what is only an echo of what, and which one is the root.

:func:`diagnose` is pure: no clock, no files, no randomness. A job calls it with what it knows, ``hotswap classify`` with what
it read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from hotswap.diagnosis.cases import PREDICATES
from hotswap.diagnosis.find import GRAM, Finder
from hotswap.diagnosis.incidents import split
from hotswap.diagnosis.literals import required_literals
from hotswap.diagnosis.model import Blames, Culprit, Diagnosis, Evidence, Finding, Strength, Verdict
from hotswap.diagnosis.rule import Case, Fact, Rule, Text
from hotswap.diagnosis.table import RULES

SHOWN_MAX = 20
"""Deciding and echo observations that an answer carries at most."""


FACT_KINDS = frozenset(
    {"nvml", "ib_counter", "shm", "disk", "cgroup", "host_kills", "silent", "probe", "op_count", "blame"}
)
"""Observations that were never a line of a log. Their text is only for people, so no expression is tried on it."""


class RuleBook:
    """The rules, indexed so that an observation meets only those that may apply to it."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        """Indexes *rules*, whose order stays that of precedence."""
        self.rules = tuple(rules)
        self.cases = tuple(rule for rule in self.rules if isinstance(rule.when, Case))
        self._by_kind: dict[str, list[tuple[int, Rule]]] = defaultdict(list)
        self._texts: list[tuple[int, Rule]] = []
        self._by_literal: dict[str, list[tuple[int, Rule]]] = defaultdict(list)
        for position, rule in enumerate(self.rules):
            if isinstance(rule.when, Fact):
                self._by_kind[rule.when.kind].append((position, rule))
            elif isinstance(rule.when, Text):
                self._index(position, rule, required_literals(rule.when.pattern))
        self._finder = Finder(self._by_literal)

    def _index(self, position: int, rule: Rule, literals: frozenset[str]) -> None:
        """Under its literals; a rule of which none is certain, or none long enough, is tried on every text."""
        if not literals or min(map(len, literals)) < GRAM:
            self._texts.append((position, rule))
            return
        for literal in literals:
            self._by_literal[literal].append((position, rule))

    def text_patterns(self) -> tuple[str, ...]:
        """The expressions of all text rules."""
        return tuple(rule.when.pattern for rule in self.rules if isinstance(rule.when, Text))

    def first(self, evidence: Evidence) -> Rule | None:
        """The first rule in the table that applies to *evidence* alone."""
        best: tuple[int, Rule] | None = None
        for position, rule in self._by_kind.get(evidence.kind, ()):
            if rule.when.matches(evidence):  # type: ignore[union-attr]
                best = position, rule
                break
        if evidence.kind in FACT_KINDS:
            return best[1] if best else None
        candidates = dict(self._texts)
        for literal in self._finder.within(evidence.text):
            candidates.update(self._by_literal[literal])
        for position in sorted(candidates):
            if best is not None and position > best[0]:
                break
            if candidates[position].when.matches(evidence):  # type: ignore[union-attr]
                return candidates[position]
        return best[1] if best else None


@lru_cache(maxsize=1)
def default_book() -> RuleBook:
    """hotswap's own rules, indexed once."""
    return RuleBook()


_CONTEXT_KINDS = frozenset(
    {
        "op_count",
        "blame",
        "cgroup",
        "host_kills",
        "progress",
        "host_memory",
        "loading",
        "closing",
        "supervising",
        "starting",
        "saving",
        "pulse",
        "restart",
    }
)
_CHATTY = re.compile(r"\b(?:INFO|DEBUG|NOTICE)\b|\b[IW] tensorflow/")
"""Levels of messages that a program means for people who look for something else."""
_RAISED_AGAIN = re.compile(r"Caught \w+ in (?:DataLoader worker|replica|pin memory thread)")
"""An error of another process is raised again, of which its own last line, further down, says more."""
CHATTY_MAX = 0.5
_SURVIVED = re.compile(r"(?<!NCCL )\bWARN(?:ING)?\b|[Rr]etrying|will retry|attempt \d+ of")


def diagnose(evidence: Iterable[Evidence], *, book: RuleBook | None = None) -> Diagnosis:
    """What broke. Observations may come in any order, from any number of sources; the answer depends on nothing else."""
    book = book or default_book()
    findings = _findings(_in_order(_expanded(evidence)), book)
    incident, past = split(findings)
    answer = _diagnosed(incident, past, book)
    if past and not answer.confidence > ONLY_ECHOES:
        # The end shows only consequences: what was survived once may have come back, but that is a guess.
        whole = _diagnosed(findings, [], book)
        answer = replace(whole, confidence=min(whole.confidence, HISTORY_MAX))
    return answer


ONLY_ECHOES = 0.2
"""Confidence of an answer for which nothing but consequences was seen."""
HISTORY_MAX = 0.55
"""Confidence of a cause that stands before the last incident, at most: not enough to act upon."""


def _diagnosed(findings: list[Finding], past: Sequence[Finding], book: RuleBook) -> Diagnosis:
    findings, cases = _with_cases(findings, book)
    findings = _without_echoes(findings, book)
    ranked = [*cases, *findings, *(replace(finding, explained_by=HISTORY) for finding in past)]
    return _answer(_root(ranked), ranked, findings)


HISTORY = "history"
"""In place of a rule's id, for what was over before the last incident began."""


def _expanded(evidence: Iterable[Evidence]) -> Iterable[Evidence]:
    """A clean-up message that names its cause is also evidence of that cause."""
    for one in evidence:
        previous = one.fact("previous")
        if one.kind == "xid" and previous is not None:
            yield replace(one, facts={"code": previous, "gpu": one.gpu or "", "derived": True}, order=one.order - 1)
        yield one


def _in_order(evidence: Iterable[Evidence]) -> list[Evidence]:
    """By time over all sources. What has no time of its own belongs to the last that had, in the same source."""
    by_source: dict[str, list[Evidence]] = defaultdict(list)
    for one in evidence:
        by_source[one.source].append(one)
    keyed: list[tuple[float, int, int, Evidence]] = []
    for number, members in enumerate(by_source.values()):
        members.sort(key=lambda one: one.order)
        known = next((one.time for one in members if one.time is not None), float("inf"))
        for one in members:
            known = one.time if one.time is not None else known
            keyed.append((known, number, one.order, one))
    keyed.sort(key=lambda key: key[:3])
    return [one for *_, one in keyed]


def _findings(evidence: Iterable[Evidence], book: RuleBook) -> list[Finding]:
    findings: list[Finding] = []
    for one in evidence:
        rule = book.first(one)
        if rule is not None:
            findings.append(_finding(rule, one))
        elif one.kind in _CONTEXT_KINDS:
            findings.append(_context(one))
    return findings


def _finding(rule: Rule, evidence: Evidence) -> Finding:
    strength, confidence = rule.strength, rule.confidence
    if strength is Strength.CAUSE and "NCCL INFO" in evidence.text:
        strength = Strength.ECHO
    elif strength is Strength.CAUSE and _says_little(rule, evidence.text):
        strength, confidence = Strength.SYMPTOM, min(confidence, CHATTY_MAX)
    elif strength is Strength.CAUSE and _SURVIVED.search(evidence.text):
        strength = Strength.SYMPTOM
    return Finding(
        rule=rule.id,
        verdict=rule.verdict,
        strength=strength,
        confidence=confidence,
        blames=rule.blames,
        reason=rule.reason,
        evidence=evidence,
    )


def _says_little(rule: Rule, text: str) -> bool:
    """Whether an error is only mentioned, or raised a second time."""
    return bool(_RAISED_AGAIN.search(text)) or (rule.verdict is Verdict.USER_ERROR and bool(_CHATTY.search(text)))


def _context(evidence: Evidence) -> Finding:
    """An observation that no rule decides, but that case rules need."""
    return Finding(
        rule="",
        verdict=Verdict.UNKNOWN,
        strength=Strength.ECHO,
        confidence=0.0,
        blames=Blames.NOBODY,
        reason="",
        evidence=evidence,
    )


def _with_cases(findings: list[Finding], book: RuleBook) -> tuple[list[Finding], list[Finding]]:
    """(the findings with those that a case explains marked so, the findings of the cases)."""
    cases: list[Finding] = []
    explained: dict[int, str] = {}
    for rule in book.cases:
        assert isinstance(rule.when, Case)
        match = PREDICATES[rule.when.predicate](findings)
        if match is None:
            continue
        cases += [_finding(rule, one) for one in match.evidence]
        ids = {id(finding) for finding in match.explains}
        explained.update({one: rule.id for one in ids if one not in explained})
    marked = [
        replace(finding, explained_by=explained[id(finding)]) if id(finding) in explained else finding
        for finding in findings
    ]
    return marked, cases


def _without_echoes(findings: list[Finding], book: RuleBook) -> list[Finding]:
    """Marks what the table calls an echo of something that was seen on the same node as well."""
    echo_of = {rule.id: rule.echo_of for rule in book.rules if rule.echo_of}
    seen: dict[str, set[str | None]] = defaultdict(set)
    for finding in findings:
        seen[finding.rule].add(finding.evidence.node)
    marked = []
    for finding in findings:
        cause = next(
            (cause for cause in echo_of.get(finding.rule, ()) if finding.evidence.node in seen.get(cause, ())), ""
        )
        marked.append(replace(finding, explained_by=cause) if cause and not finding.explained_by else finding)
    return marked


def _root(findings: Sequence[Finding]) -> Finding | None:
    """The strongest finding that nothing explains; of equally strong ones the first in time, of mere context the surest."""
    open_ones = [finding for finding in findings if not finding.explained_by and finding.strength > Strength.ECHO]
    if not open_ones:
        return None
    best = max(finding.strength for finding in open_ones)
    if best is Strength.CONTEXT:
        return max(open_ones, key=lambda finding: finding.confidence)
    return next(finding for finding in open_ones if finding.strength is best)


def _answer(root: Finding | None, ranked: Sequence[Finding], findings: Sequence[Finding]) -> Diagnosis:
    suspects = suspected(findings)
    echoes = [f for f in ranked if f.rule and f is not root and (f.explained_by or f.strength is Strength.ECHO)]
    shown = _unique(finding.evidence for finding in echoes)
    echo_rules = tuple(dict.fromkeys(finding.rule for finding in echoes))
    if root is None:
        return Diagnosis(
            verdict=Verdict.UNKNOWN,
            confidence=ONLY_ECHOES if echoes else 0.0,
            culprit=suspects[0] if suspects else Culprit(kind=Blames.NOBODY),
            reason=(
                "only consequences were seen; the cause is not in what was read"
                if echoes
                else "nothing was recognised as a failure"
            ),
            rules=echo_rules[:3],
            deciding=shown[:3],
            echoes=shown[3:SHOWN_MAX],
            echo_rules=echo_rules,
            suspects=suspects,
        )
    same = [f for f in ranked if f.rule == root.rule and f.explained_by == ""]
    deciding = _unique(finding.evidence for finding in same)[:SHOWN_MAX]
    return Diagnosis(
        verdict=root.verdict,
        confidence=round(_confidence(root, ranked), 2),
        culprit=_culprit(root, same, suspects),
        reason=root.reason,
        rules=(root.rule, *_supporting(root, ranked)),
        deciding=deciding,
        echoes=tuple(one for one in shown if one not in deciding)[:SHOWN_MAX],
        echo_rules=echo_rules,
        proven=root.strength is Strength.PROOF,
        suspects=suspects,
    )


def _unique(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    return tuple({(one.source, one.order, one.text): one for one in evidence}.values())


def _supporting(root: Finding, findings: Iterable[Finding]) -> tuple[str, ...]:
    """Other rules that come to the same verdict."""
    return tuple(
        dict.fromkeys(
            f.rule
            for f in findings
            if f.rule != root.rule and f.verdict is root.verdict and not f.explained_by and f.rule
        )
    )


def _confidence(root: Finding, findings: Iterable[Finding]) -> float:
    """Raised a little where another rule agrees, lowered where an equally strong one says something else."""
    rivals = [f for f in findings if not f.explained_by and f.strength is root.strength and f.rule != root.rule]
    agree = any(f.verdict is root.verdict for f in rivals)
    differ = any(f.verdict not in (root.verdict, Verdict.UNKNOWN) for f in rivals)
    if root.verdict is Verdict.UNKNOWN:
        return root.confidence
    return max(0.05, min(0.99, root.confidence + 0.05 * agree - 0.1 * differ))


def _culprit(root: Finding, same: Sequence[Finding], suspects: tuple[Culprit, ...]) -> Culprit:
    evidence = root.evidence
    peer = evidence.fact("peer")
    gpu = evidence.gpu or None
    if root.rule == "case.xid-repeats":
        gpu = Counter(f.evidence.gpu for f in same).most_common(1)[0][0]
    detail = f"link {evidence.fact('link')}" if evidence.fact("link") is not None else ""
    if root.rule == "xid.149-peer":
        detail = f"the other end of {detail or 'the link'}"
    node = evidence.node or (str(evidence.fact("node")) if evidence.fact("node") is not None else None)
    if root.blames is Blames.PEER:
        node = None
    if root.verdict is Verdict.UNKNOWN and root.blames is Blames.RANK and evidence.rank is None and suspects:
        return suspects[0]
    return Culprit(
        kind=root.blames,
        node=node,
        rank=evidence.rank,
        gpu=gpu,
        peer=str(peer) if peer else None,
        detail=detail,
    )


def suspected(findings: Sequence[Finding]) -> tuple[Culprit, ...]:
    """Whom the job's own traffic points at: most blamed peers, ranks that are named missing, laggards of a group."""
    suspects = [
        *_blamed(findings),
        *_missing(findings),
        *_laggards(findings),
    ]
    return tuple(dict.fromkeys(suspects))[:8]


def _blamed(findings: Sequence[Finding]) -> list[Culprit]:
    edges: dict[str, set[object]] = defaultdict(set)
    for finding in findings:
        peer = finding.evidence.fact("peer")
        if peer and finding.evidence.kind in ("ib_completion", "peer_gone", "blame"):
            edges[str(peer)].add(finding.evidence.node or finding.evidence.rank or finding.evidence.source)
    ordered = sorted(edges, key=lambda peer: (-len(edges[peer]), peer))
    return [Culprit(kind=Blames.PEER, peer=peer, detail=f"named by {len(edges[peer])}") for peer in ordered[:3]]


def _missing(findings: Sequence[Finding]) -> list[Culprit]:
    named: Counter[int] = Counter()
    for finding in findings:
        if finding.evidence.kind in ("stall", "hccl_wait"):
            named.update(int(rank) for rank in re.findall(r"\d+", str(finding.evidence.fact("missing"))))
    return [
        Culprit(kind=Blames.RANK, rank=rank, detail="did not come to a collective") for rank, _ in named.most_common(3)
    ]


def _laggards(findings: Sequence[Finding]) -> list[Culprit]:
    """In each named group, the ranks that are furthest behind, where not all are equally far; and who never reported."""
    reached: dict[object, dict[int, int]] = defaultdict(dict)
    waiting: set[int] = set()
    for finding in findings:
        evidence = finding.evidence
        if evidence.rank is None:
            continue
        if evidence.kind == "collective_timeout":
            waiting.add(evidence.rank)
            if evidence.fact("group") is not None:
                _lower(reached[evidence.fact("group")], evidence.rank, int(evidence.fact("seq") or 0))
        elif evidence.kind == "op_count":
            _lower(reached[evidence.fact("group")], evidence.rank, int(evidence.fact("issued") or 0))
    suspects = []
    for group, ranks in reached.items():
        lowest = min(ranks.values())
        if lowest < max(ranks.values()):
            suspects += [
                Culprit(kind=Blames.RANK, rank=rank, detail=f"behind in group {group} (at {count})")
                for rank, count in sorted(ranks.items())
                if count == lowest
            ]
    return suspects + _silent(waiting)


def _lower(ranks: dict[int, int], rank: int, count: int) -> None:
    ranks[rank] = min(count, ranks.get(rank, count))


def _silent(waiting: set[int]) -> list[Culprit]:
    """The one rank missing from 0..n-1 among those that report a time-out, if it is one."""
    if len(waiting) < 2:
        return []
    absent = set(range(max(waiting) + 1)) - waiting
    if len(absent) != 1:
        return []
    return [
        Culprit(kind=Blames.RANK, rank=rank, detail="the only one that does not report a time-out") for rank in absent
    ]
