"""Predicates over all findings at once: what no single line says.

Each takes the findings in order of time and returns what it found, or None. They see only findings of line rules, never each
other's. The table names them; :data:`PREDICATES` is how.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from hotswap.diagnosis.model import Blames, Evidence, Finding, Strength, Verdict

Findings = Sequence[Finding]


@dataclass(frozen=True, kw_only=True)
class Match:
    """What a predicate found: the evidence that decides, and the findings that are thereby explained."""

    evidence: tuple[Evidence, ...]
    explains: tuple[Finding, ...] = ()


Predicate = Callable[[Findings], "Match | None"]

_WHOLE_GROUP_OPS = frozenset({"ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLREDUCE_COALESCED", "BARRIER"})
"""Collectives in which all members pass equally sized tensors."""


def of_kind(findings: Findings, *kinds: str) -> list[Finding]:
    """Those whose evidence is of one of *kinds*."""
    return [finding for finding in findings if finding.evidence.kind in kinds]


def of_rule(findings: Findings, *rules: str) -> list[Finding]:
    """Those of one of *rules*."""
    return [finding for finding in findings if finding.rule in rules]


def _mismatch(findings: Findings, *, group_known: bool) -> Match | None:
    calls: dict[tuple[object, object], dict[int, Finding]] = defaultdict(dict)
    for finding in of_kind(findings, "collective_timeout"):
        evidence = finding.evidence
        if evidence.rank is not None and (evidence.fact("group") is not None) is group_known:
            calls[evidence.fact("group"), evidence.fact("seq")][evidence.rank] = finding
    for members in calls.values():
        found = list(members.values())
        if len({finding.evidence.fact("op") for finding in found}) > 1 or _sizes_differ(found):
            return Match(evidence=tuple(finding.evidence for finding in found))
    return None


def _sizes_differ(found: Iterable[Finding]) -> bool:
    sizes = {
        finding.evidence.fact("numel_in")
        for finding in found
        if finding.evidence.fact("op") in _WHOLE_GROUP_OPS and finding.evidence.fact("numel_in") is not None
    }
    return len(sizes) > 1


def collective_mismatch(findings: Findings) -> Match | None:
    """Members of one group wait in different operations, or with different sizes, under one sequence number."""
    return _mismatch(findings, group_known=True)


def collective_mismatch_unnamed(findings: Findings) -> Match | None:
    """The same, printed without the group's name: may be two groups that count alike."""
    return _mismatch(findings, group_known=False)


_ALIKE = ("hsa.aperture", "hsa.exception")
"""What is a process's fault on one rank, but the program's if nearly all say it."""


def alike_everywhere(findings: Findings) -> Match | None:
    """The same exception on at least two ranks, and on nearly all ranks that said anything."""
    heard = {finding.evidence.rank for finding in findings if finding.evidence.rank is not None}
    by_text: dict[str, dict[int, Finding]] = defaultdict(dict)
    for finding in findings:
        own = (
            finding.verdict is Verdict.USER_ERROR
            and finding.blames is Blames.CODE
            and finding.strength >= Strength.SYMPTOM
        )
        if finding.evidence.rank is not None and (own or finding.rule in _ALIKE):
            by_text[re.sub(r"[0-9]+", "", finding.evidence.text)[:120]][finding.evidence.rank] = finding
    for ranks in by_text.values():
        if len(ranks) >= 2 and len(ranks) >= 0.8 * len(heard):
            found = tuple(ranks.values())
            return Match(evidence=tuple(finding.evidence for finding in found), explains=found)
    return None


def before_first_step(findings: Findings) -> Match | None:
    """An exception of which nothing more is known, after the launch and before the second step."""
    launched = of_kind(findings, "restart")
    unknown = of_rule(findings, "python.other-exception")
    if not launched or not unknown or findings.index(launched[0]) > findings.index(unknown[0]):
        return None
    if any(int(finding.evidence.fact("step") or 0) > 1 for finding in of_kind(findings, "progress")):
        return None
    return Match(evidence=(unknown[0].evidence,), explains=tuple(unknown))


APPLICATION_XIDS = frozenset({8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 45, 69, 80})
REPEATS_MIN = 3


def xid_repeats(findings: Findings) -> Match | None:
    """A code that applications cause, from three or more processes on one GPU: then it is the GPU."""
    by_gpu: dict[tuple[object, object], dict[object, Finding]] = defaultdict(dict)
    for finding in of_kind(findings, "xid"):
        evidence = finding.evidence
        if evidence.fact("code") in APPLICATION_XIDS and evidence.fact("pid") is not None and evidence.gpu:
            by_gpu[evidence.node, evidence.gpu][evidence.fact("pid")] = finding
    worst = max(by_gpu.values(), key=len, default={})
    separate = _spread(list(worst.values()))
    if len(worst) >= REPEATS_MIN and separate and len(by_gpu) <= 3:
        return Match(evidence=tuple(finding.evidence for finding in worst.values()), explains=tuple(worst.values()))
    return None


def _spread(found: Findings) -> bool:
    """Not all within one minute: the ranks of a job that share a GPU's fate are one event."""
    times = [finding.evidence.time for finding in found if finding.evidence.time is not None]
    return len(times) < 2 or max(times) - min(times) > 60


def nvlink_hang(findings: Findings) -> Match | None:
    """A non-fatal NVLink event together with a fault that came over the link, or with a collective that hangs."""
    events = [
        finding
        for finding in of_kind(findings, "xid")
        if finding.rule.endswith("-nonfatal") or finding.rule in ("xid.147", "xid.148")
    ]
    if not events:
        return None
    others = of_rule(findings, "xid.137", "collective.timeout")
    explains = (*events, *of_rule(findings, "xid.137"))
    return Match(evidence=tuple(f.evidence for f in (*events, *others)), explains=explains) if others else None


def parked_after_memory_error(findings: Findings) -> Match | None:
    """A contained memory error, after which the node's own agent stopped offering the GPU."""
    contained = of_rule(findings, "xid.94", "xid.156")
    parked = of_rule(findings, "gpu.unhealthy-device-plugin")
    if contained and parked:
        return Match(evidence=(contained[0].evidence, parked[0].evidence), explains=tuple(contained))
    return None


def killed_for_memory(findings: Findings) -> Match | None:
    """Killed without a word while the log shows host memory filling up, or a checkpoint being read into it."""
    killed = of_rule(findings, "exit.killed")
    if not killed or _closed_by_launcher(findings, killed):
        return None
    sizes = [int(finding.evidence.fact("bytes") or 0) for finding in of_kind(findings, "host_memory")]
    full = len(sizes) >= 2 and sizes[-1] >= sizes[0] and sizes[-1] > 8 << 30
    loading = of_kind(findings, "loading")
    if not full and not loading:
        return None
    return Match(evidence=(killed[0].evidence, *(f.evidence for f in loading[:1])), explains=tuple(killed))


def killed_not_for_memory(findings: Findings) -> Match | None:
    """Killed on a node whose kernel counts no kill for memory since, in the job's control group or at all."""
    return _killed_and_counted(findings, [f for f in _kill_counts(findings) if f.evidence.fact("oom_kill") == 0])


def killed_as_host_ran_out(findings: Findings) -> Match | None:
    """Killed while the kernel of its node has killed for memory; whom, it does not say."""
    counted = [f for f in of_kind(findings, "host_kills") if int(f.evidence.fact("oom_kill") or 0) > 0]
    return _killed_and_counted(findings, counted)


def _kill_counts(findings: Findings) -> list[Finding]:
    return of_kind(findings, "cgroup", "host_kills")


def _killed_and_counted(findings: Findings, counted: Findings) -> Match | None:
    by_node = {finding.evidence.node: finding for finding in counted}
    killed = [finding for finding in of_rule(findings, "exit.killed") if finding.evidence.node in by_node]
    if not killed:
        return None
    return Match(evidence=(killed[0].evidence, by_node[killed[0].evidence.node].evidence), explains=tuple(killed))


def aborted_first(findings: Findings) -> Match | None:
    """A running job lost a worker by SIGABRT, and nobody had failed before it: it did that to itself."""
    aborted = [f for f in of_rule(findings, "exit.stopped") if f.evidence.fact("signal") == 6]
    first = next((f for f in aborted if f.evidence.source == "agent"), None)
    others = of_kind(findings, "collective_timeout", "silent", "stall")
    if first is None or others:
        return None
    return Match(evidence=(first.evidence,), explains=(first,))


def _closed_by_launcher(findings: Findings, killed: Findings) -> bool:
    closed = {finding.evidence.fact("pid") for finding in of_kind(findings, "closing")}
    return all(finding.evidence.fact("pid") in closed for finding in killed)


def killed_by_launcher(findings: Findings) -> Match | None:
    """Killed after the launcher had told this very process to stop: nothing but the end of its patience."""
    killed = [finding for finding in of_rule(findings, "exit.killed") if finding.evidence.fact("pid") is not None]
    if killed and _closed_by_launcher(findings, killed):
        return Match(evidence=tuple(finding.evidence for finding in killed), explains=tuple(killed))
    return None


_CONNECTS = (
    "net.no-route",
    "gloo.full-mesh",
    "net.unknown-name",
    "rdzv.store-unreachable",
    "rdzv.unreachable",
    "net.connect-aborted",
)
_RUNNING_SEQ = 50
"""A sequence number from which on a group has been working, not being set up."""


def connect_after_start(findings: Findings) -> Match | None:
    """A peer could not be reached although the job had been running: it died; the set-up was right."""
    connects = of_rule(findings, *_CONNECTS)
    ran = [f for f in of_kind(findings, "collective_timeout") if int(f.evidence.fact("seq") or 0) >= _RUNNING_SEQ]
    ran += [f for f in of_kind(findings, "progress") if int(f.evidence.fact("step") or 0) >= 1]
    ran += of_kind(findings, "supervising")
    if connects and ran:
        return Match(evidence=(connects[0].evidence, ran[0].evidence), explains=tuple(connects))
    return None


def both_ends_reset(findings: Findings) -> Match | None:
    """Two nodes say of each other that the connection was reset, and nobody says anything else: the way between them."""
    resets = [f for f in findings if "reset by peer" in f.evidence.text and f.evidence.node]
    nodes = {finding.evidence.node for finding in resets}
    others = [f for f in findings if f.strength > Strength.CONTEXT or f.evidence.kind == "collective_timeout"]
    if len(nodes) == 2 and not others:
        return Match(evidence=tuple(finding.evidence for finding in resets[:4]))
    return None


def memory_before_model(findings: Findings) -> Match | None:
    """The driver had no memory while the process was only being set up."""
    bare = of_rule(findings, "gpu.oom-bare", "gpu.oom-other-text")
    starting = of_kind(findings, "starting")
    if bare and starting and not of_kind(findings, "progress", "cuda_oom"):
        return Match(evidence=(bare[0].evidence, starting[0].evidence), explains=tuple(bare))
    return None


_LOST_FILE = ("FileNotFoundError", "LocalEntryNotFoundError", "OSError", "DatasetNotFoundError", "ConnectionError")


def retries_then_error(findings: Findings) -> Match | None:
    """A download was tried again and again, and what finally came looks like a wrong path."""
    network = of_rule(findings, "hub.unavailable", "hub.client-error", "storage.object-store")
    errors = [
        finding
        for finding in findings
        if finding.strength >= Strength.SYMPTOM
        and finding.rule not in ("hub.unavailable", "hub.client-error", "storage.object-store")
        and finding.evidence.text.split(":")[0].rsplit(".", 1)[-1] in _LOST_FILE
    ]
    if network and errors and findings.index(network[0]) < findings.index(errors[-1]):
        return Match(evidence=(network[0].evidence, errors[-1].evidence), explains=tuple(errors))
    return None


BLAMERS_MIN = 3


def everybody_blames_one(findings: Findings) -> Match | None:
    """Three or more nodes lost the same peer, nobody lost another, and the peer itself says nothing."""
    edges: dict[str, set[str]] = defaultdict(set)
    seen: list[Finding] = []
    for finding in of_kind(findings, "ib_completion", "peer_gone", "blame"):
        peer, node = finding.evidence.fact("peer"), finding.evidence.node
        if peer and node and finding.rule != "ib.flushed" and str(peer) != node:
            edges[str(peer)].add(node)
            seen.append(finding)
    if len(edges) != 1:
        return None
    (peer, nodes), *_ = edges.items()
    talks = any(finding.evidence.node == peer for finding in findings)
    if len(nodes) < BLAMERS_MIN or talks:
        return None
    return Match(evidence=tuple(finding.evidence for finding in seen))


COMMON_CAUSE_NODES = 3
COMMON_CAUSE_S = 3.0


def common_cause(findings: Findings) -> Match | None:
    """Three or more nodes lost within three seconds: a switch, power or a file server, not as many bad nodes."""
    lost = of_rule(findings, "job.node-silent", "job.agent-silent", "kube.node-lost", "slurm.node-failure")
    timed = [finding for finding in lost if finding.evidence.time is not None and finding.evidence.node]
    nodes = {finding.evidence.node for finding in timed}
    if len(nodes) < COMMON_CAUSE_NODES:
        return None
    times = [finding.evidence.time for finding in timed if finding.evidence.time is not None]
    if max(times) - min(times) > COMMON_CAUSE_S:
        return None
    return Match(evidence=tuple(finding.evidence for finding in timed), explains=tuple(lost))


_FAILURES = ("collective.timeout", "net.peer-gone", "ib.retries")


def terminated_after_failure(findings: Findings) -> Match | None:
    """The launcher was told to stop after ranks had already lost each other: clean-up by whoever noticed first."""
    asked = of_rule(findings, "agent.terminated")
    failed = of_rule(findings, *_FAILURES)
    if asked and failed and findings.index(failed[0]) < findings.index(asked[0]):
        return Match(evidence=(failed[0].evidence, asked[0].evidence), explains=tuple(asked))
    return None


def timeout_while_saving(findings: Findings) -> Match | None:
    """All that happened between the last step and the time-outs is that a checkpoint was being written."""
    kinds = [
        finding.evidence.kind
        for finding in findings
        if finding.evidence.kind in ("progress", "saving", "collective_timeout")
    ]
    timeouts = of_kind(findings, "collective_timeout")
    if not timeouts or any(finding.strength >= Strength.SYMPTOM for finding in findings):
        return None
    before = kinds[: kinds.index("collective_timeout")]
    if not before or before[-1] != "saving":
        return None
    return Match(evidence=(of_kind(findings, "saving")[-1].evidence, timeouts[0].evidence))


SILENT_S = 1800.0


def silent_hang(findings: Findings) -> Match | None:
    """The job is said to run, again and again, but no step has been finished for half an hour."""
    steps = [index for index, finding in enumerate(findings) if finding.evidence.kind == "progress"]
    pulses = [f for f in findings[steps[-1] + 1 :] if f.evidence.kind == "pulse"] if steps else []
    times = [pulse.evidence.time for pulse in pulses if pulse.evidence.time is not None]
    if len(times) < 2 or max(times) - min(times) < SILENT_S:
        return None
    if any(
        finding.strength >= Strength.SYMPTOM or finding.evidence.kind == "collective_timeout" for finding in findings
    ):
        return None
    return Match(evidence=(findings[steps[-1]].evidence, pulses[-1].evidence))


FLAPS_MIN = 3


def link_flaps(findings: Findings) -> Match | None:
    """One node's link went down three times or more: no accident any longer."""
    by_node: dict[str | None, list[Finding]] = defaultdict(list)
    for finding in of_rule(findings, "nic.link-down"):
        by_node[finding.evidence.node].append(finding)
    worst = max(by_node.values(), key=lambda found: sum(f.evidence.count for f in found), default=[])
    if sum(finding.evidence.count for finding in worst) >= FLAPS_MIN:
        return Match(evidence=tuple(finding.evidence for finding in worst), explains=tuple(worst))
    return None


def _series(findings: Findings, name: str) -> list[tuple[Evidence, float]]:
    found = of_kind(findings, "progress")
    return [(f.evidence, float(value)) for f in found if (value := f.evidence.fact(name)) is not None]


SLOWER = 1.035
STEADY = 1.01


def slowdown(findings: Findings) -> Match | None:
    """Steps were steady, then all became slower by a few per cent and stayed so."""
    series = _series(findings, "seconds")
    for cut in range(2, len(series) - 1):
        before, after = [value for _, value in series[:cut]], [value for _, value in series[cut:]]
        usual = median(before)
        if max(before) <= usual * STEADY and min(after) >= usual * SLOWER:
            return Match(evidence=tuple(evidence for evidence, _ in series[cut - 1 : cut + 2]))
    return None


SPIKE = 20.0


def loss_spike(findings: Findings) -> Match | None:
    """The gradient norm rose twentyfold and more over its usual value before, and the loss with it."""
    norms, losses = _series(findings, "grad_norm"), _series(findings, "loss")
    if len(norms) < 3 or len(losses) != len(norms):
        return None
    worst = max(range(len(norms)), key=lambda index: norms[index][1])
    if worst == 0:  # Before it is always higher: training begins with large gradients.
        return None
    usual = median(value for _, value in norms[:worst])
    if norms[worst][1] > SPIKE * max(usual, 1e-9) and losses[worst][1] > 1.02 * min(value for _, value in losses):
        return Match(evidence=(norms[0][0], norms[worst][0]))
    return None


def crash_everywhere(findings: Findings) -> Match | None:
    """Native crashes on two or more ranks within a second, before any step: the program, not as many nodes."""
    crashed = of_rule(findings, "exit.segfault", "process.segfault")
    ranks = {f.evidence.rank for f in crashed if f.evidence.rank is not None}
    if len(ranks) < 2 or of_kind(findings, "progress", "collective_timeout"):
        return None
    return Match(evidence=tuple(f.evidence for f in crashed), explains=tuple(crashed))


PREDICATES: dict[str, Predicate] = {
    predicate.__name__: predicate
    for predicate in (
        collective_mismatch,
        collective_mismatch_unnamed,
        alike_everywhere,
        before_first_step,
        xid_repeats,
        nvlink_hang,
        parked_after_memory_error,
        killed_for_memory,
        killed_not_for_memory,
        killed_as_host_ran_out,
        aborted_first,
        killed_by_launcher,
        connect_after_start,
        both_ends_reset,
        everybody_blames_one,
        common_cause,
        terminated_after_failure,
        link_flaps,
        slowdown,
        loss_spike,
        timeout_while_saving,
        silent_hang,
        memory_before_model,
        retries_then_error,
        crash_everywhere,
    )
}
