"""Every rule decides what it is for and leaves alone what only looks like it; the table itself has no dead rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotswap.diagnosis import Evidence, Strength, Verdict
from hotswap.diagnosis.cases import PREDICATES
from hotswap.diagnosis.cause import default_book
from hotswap.diagnosis.codes_xid import XIDS
from hotswap.diagnosis.lint import report, sentences
from hotswap.diagnosis.model import Value
from hotswap.diagnosis.readers import read_text
from hotswap.diagnosis.rule import Case, Fact, Rule, Text
from hotswap.diagnosis.table import LINE_RULES, RULES

BY_ID = {rule.id: rule for rule in RULES}
EXAMPLES = [
    tuple(line.split(" ", 2))
    for line in Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]

FACTS: dict[str, tuple[dict[str, Value], dict[str, Value]]] = {
    "cgroup.oom-kill": ({"oom_kill": 1}, {"oom_kill": 0}),
    "shm.nearly-full": ({"used_percent": 99.5}, {"used_percent": 97}),
    "disk.nearly-full": ({"used_percent": 99.5}, {"used_percent": 98.9}),
    "nvml.row-remap-failure": ({"row_remap_failure": True}, {"row_remap_failure": False}),
    "nvml.ecc-uncorrected": ({"ecc_uncorrected": 1}, {"ecc_uncorrected": 0}),
    "nvml.recovery-action": ({"recovery_action": 2}, {"recovery_action": 0}),
    "nvml.fabric": ({"fabric_healthy": False}, {"fabric_healthy": True}),
    "nvml.row-remap-pending": ({"row_remap_pending": True}, {"row_remap_pending": False}),
    "nvml.throttled": ({"hw_slowdown": True}, {"hw_slowdown": False}),
    "ib.link-counter": ({"link_downed_delta": 1}, {"link_downed_delta": 0}),
    "ib.port-down": ({"state": "DOWN"}, {"state": "ACTIVE"}),
    "ib.symbol-errors": ({"symbol_error_delta": 1000}, {"symbol_error_delta": 999}),
    "job.node-silent": ({"reachable": False}, {"reachable": True}),
    "job.agent-silent": ({"reachable": True}, {"reachable": False}),
    "job.probe-failed": ({"ok": False}, {"ok": True}),
    "python.pipe-gone": ({"type": "EOFError", "pipe": True}, {"type": "EOFError"}),
    "python.background": ({"family": "program", "background": True}, {"family": "program"}),
    "python.interrupted": ({"family": "person"}, {"family": "program"}),
}
"""For rules over facts that a job reports: one set that they decide, one that they do not."""


def _decided(text: str) -> list[str]:
    found = [default_book().first(one) for one in read_text(text)]
    return [rule.id for rule in found if rule]


@pytest.mark.parametrize(("name", "sign", "text"), EXAMPLES, ids=[f"{one[0]}{one[1]}" for one in EXAMPLES])
def test_example(name: str, sign: str, text: str) -> None:
    assert (name in _decided(text)) is (sign == "+"), _decided(text)


@pytest.mark.parametrize("name", FACTS)
def test_fact(name: str) -> None:
    when = BY_ID[name].when
    assert isinstance(when, Fact)
    for facts, decides in zip(FACTS[name], (True, False), strict=True):
        rule = default_book().first(Evidence(kind=when.kind, facts=facts))
        assert (rule is not None and rule.id == name) is decides, rule


def test_every_rule_has_an_example_and_a_near_miss() -> None:
    for sign in "+-":
        covered = {name for name, given, _ in EXAMPLES if given == sign} | set(FACTS)
        missing = {rule.id for rule in LINE_RULES if rule.id not in covered and not rule.id.startswith("xid.")}
        assert not missing, f"no {sign} example for {sorted(missing)}"


@pytest.mark.parametrize("code", sorted(XIDS))
def test_xid(code: int) -> None:
    line = f"kernel: NVRM: Xid (PCI:0000:3D:00): {code}, pid=4711, name=python3, Ch 00000008"
    assert _decided(line) == [f"xid.{code}"]
    assert f"xid.{code}" not in _decided(line.replace(f" {code},", f" {code}9,"))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("NVRM: Xid (PCI:0000:3d:00): 45, pid=1, Ch 00000001", "xid.45"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, GPU recovery action changed from 0x1 (Reset) to 0x0 (None)", "xid.154-none"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "xid.154-1"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)", "xid.154-2"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "xid.154-3"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "xid.154-4"),
        ("NVRM: Xid (PCI:0000:3d:00): 154, (text lost)", "xid.154-unread"),
        ("NVRM: Xid (PCI:0000:3d:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x01500000 0x00000000 0x0)", "xid.149-peer"),
        ("NVRM: Xid (PCI:0000:3d:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x00f00000 0x00000000 0x0)", "xid.149-software"),
        ("NVRM: Xid (PCI:0000:3d:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x00400000 0x00000000 0x0)", "xid.149"),
        ("NVRM: Xid (PCI:0000:3d:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x0)", "xid.144-nonfatal"),
        ("NVRM: Xid (PCI:0000:3d:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x0)", "xid.145-nonfatal"),
        ("NVRM: Xid (PCI:0000:3d:00): 146, TLW_CTRL Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x0)", "xid.146-nonfatal"),
        ("NVRM: Xid (PCI:0000:3d:00): 144, SAW_MVB Fatal XC0 i0 Link 0 (0x00000001 0x00000002 0x0)", "xid.144"),
        ("NVRM: Xid (PCI:0000:3d:00): 999, something new", "xid.other"),
        ("XidCriticalError: Xid=79 on Device=GPU-1111, the device will go unhealthy.", "xid.79"),
    ],
)  # fmt: skip
def test_xid_with_details(line: str, rule: str) -> None:
    assert _decided(line) == [rule]


def test_every_special_xid_rule_is_tested() -> None:
    plain = {f"xid.{code}" for code in XIDS}
    special = {rule.id for rule in RULES if rule.id.startswith("xid.")} - plain
    marks = test_xid_with_details.pytestmark  # type: ignore[attr-defined]
    tested = {rule for mark in marks for _, rule in mark.args[1]}
    assert special <= tested


def test_the_table_has_no_dead_and_no_ambiguous_rows() -> None:
    assert report(RULES) == []


def test_an_unreachable_rule_is_found() -> None:
    general, special = BY_ID["storage.full"], BY_ID["storage.full"]
    shadowed = replace(special, id="site.full", when=Text("No space left on device"), verdict=Verdict.TRANSIENT)
    assert [line for line in report((general, shadowed)) if "site.full" in line] == [
        "site.full: never applies, storage.full takes everything before it"
    ]
    fact = replace(BY_ID["xid.79"], id="site.79")
    assert "site.79: never applies, xid.79 takes everything before it" in report((BY_ID["xid.79"], fact))


def test_an_overlap_is_found() -> None:
    mine = replace(
        BY_ID["storage.full"],
        id="site.disk",
        when=Text("No space left on device|scratch is gone"),
        verdict=Verdict.TRANSIENT,
    )
    assert report((BY_ID["storage.full"], mine)) == [
        "site.disk: overlaps storage.full, which says storage; their order decides"
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": "storage.full"}, "more than one rule has this id"),
        ({"id": "x", "echo_of": ("no.such",)}, "is an echo of no.such, which is no rule"),
        ({"id": "x", "when": Case("no_such")}, "there is no predicate no_such"),
        ({"id": "x", "when": Text(r"\d+ \w+")}, "no literal is certain"),
        ({"id": "x", "when": Text("abc def")}, None),
    ],
)
def test_the_linter_finds(change: dict[str, object], complaint: str | None) -> None:
    rules = (BY_ID["storage.full"], replace(BY_ID["storage.io-error"], **change))  # type: ignore[arg-type]
    text = "\n".join(report(rules))
    assert complaint in text if complaint else "no literal" in text


def test_sentences_are_matched_by_their_expression() -> None:
    for rule in RULES:
        if isinstance(rule.when, Text):
            compiled = rule.when.compiled
            assert any(compiled.search(text) for text in sentences(rule.when.pattern)), rule.id


def test_every_predicate_is_in_the_table() -> None:
    assert {rule.when.predicate for rule in RULES if isinstance(rule.when, Case)} == set(PREDICATES)


def test_no_user_error_is_said_of_hardware_codes() -> None:
    for rule in RULES:
        if rule.id.startswith(("xid.", "sxid.", "gpu.", "nvml.", "pcie.", "cpu.")):
            assert rule.verdict is not Verdict.USER_ERROR, rule.id


def test_echoes_never_carry_a_verdict() -> None:
    for rule in RULES:
        if rule.strength is Strength.ECHO:
            assert rule.verdict is Verdict.UNKNOWN, rule.id


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("https://docs.kernel.org/admin-guide/cgroup-v2.html#memory", ""),
        ("https://github.com/NVIDIA/nccl/issues/1191", ""),
        ("https://github.com/NVIDIA/NVSentinel", "no thread and no file"),
        ("https://github.com/NVIDIA/nccl/blob/master/src/misc/socket.cc", ""),
        ("https://github.com/NVIDIA/nccl/issue/1191", "no thread and no file"),
        ("https://github.com/NVIDIA/nccl/issues/", "no thread and no file"),
        ("https://github.com/NVIDIA", "no thread and no file"),
        ("https://docs.nvidia.com", "not the https address of a page"),
        ("https://docs.nvidia.com/", "not the https address of a page"),
        ("http://docs.nvidia.com/deploy/xid-errors/index.html", "not the https address of a page"),
        ("docs.nvidia.com/deploy", "not the https address of a page"),
        ("https://docs.nvidia.com/deploy/xid errors", "not the https address of a page"),
        ("https://wiki.corp/gpus/xid", "not public"),
        ("https://10.0.0.7/wiki", "not public"),
    ],
)
def test_a_source_that_nobody_can_open_is_found(source: str, complaint: str) -> None:
    found = [line for line in report((replace(BY_ID["storage.full"], source=source),)) if source in line]
    assert bool(found) is bool(complaint) and all(complaint in line for line in found)


def test_a_rule_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="confidence"):
        replace(BY_ID["storage.full"], confidence=1.5)
    with pytest.raises(ValueError, match="needs a reason"):
        replace(BY_ID["storage.full"], source="")
    assert isinstance(BY_ID["storage.full"], Rule)
