"""What is read from the output of a worker that has ended, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hotswap.core.messages import WorkerEvidence
from hotswap.node import witness
from hotswap.node.witness import CLUES_MAX, TAIL_BYTES, TEXT_CHARS_MAX, LastWords, Witness
from hotswap.replication import memory

TRACE = (
    "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n    step()\nKeyError: 'lr_decay'\n"
)


@pytest.fixture(autouse=True)
def kills(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the kernel counts in this process's control group."""
    counts = {"oom_kill": 3}
    monkeypatch.setattr(memory, "control_group_file", lambda _: f"oom 9\noom_kill {counts['oom_kill']}\n")
    return counts


def test_the_cause_is_among_the_clues_of_a_long_output(tmp_path: Path) -> None:
    path = tmp_path / "slot1.err"
    path.write_text("step 7 loss 2.5\n" * 40_000 + TRACE)
    assert path.stat().st_size > TAIL_BYTES
    clues = Witness("a#1").clues_of([path, tmp_path / "missing"], rank=1)
    assert clues[0].text == "KeyError: 'lr_decay'"
    assert clues[0].source == "slot1.err"


def test_clues_are_few_and_short(tmp_path: Path) -> None:
    path = tmp_path / "slot0.err"
    path.write_text("".join(f"ValueError: shape {n} {'x' * 1000}\n" for n in range(200)))
    clues = Witness("a#1").clues_of([path], rank=0)
    assert 0 < len(clues) <= CLUES_MAX
    assert max(len(clue.text) for clue in clues) <= TEXT_CHARS_MAX


def test_silence_is_no_clue(tmp_path: Path) -> None:
    (tmp_path / "slot0.err").write_text("step 1 loss 2.0\n")
    assert Witness("a#1").clues_of([tmp_path / "slot0.err"], rank=0, with_machine=False) == ()


def test_that_nothing_was_killed_for_memory_is_told_and_only_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (clue,) = Witness("a#1").clues_of([], rank=0)
    assert (clue.kind, clue.facts) == ("cgroup", {"oom_kill": 0})
    monkeypatch.setattr(memory, "control_group_file", lambda _: "")
    monkeypatch.setattr(witness, "VMSTAT", tmp_path / "missing")
    assert Witness("a#1").clues_of([], rank=0) == ()


def test_where_no_control_group_counts_the_machine_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 77\noom_kill 5\n")
    monkeypatch.setattr(witness, "VMSTAT", vmstat)
    monkeypatch.setattr(memory, "control_group_file", lambda _: "")
    seen = Witness("a#1")
    vmstat.write_text("pgfault 99\noom_kill 6\n")
    assert [(clue.kind, clue.facts) for clue in seen.clues_of([], rank=0)] == [("host_kills", {"oom_kill": 1})]
    assert [clue.facts for clue in seen.clues_of([], rank=0)] == [{"oom_kill": 0}]


def test_a_kill_for_memory_is_told_once_and_only_if_it_came_after_the_start(kills: dict[str, int]) -> None:
    seen = Witness("a#1")
    counts = []
    for killed in (0, 2, 0):
        kills["oom_kill"] += killed
        (clue,) = seen.clues_of([], rank=0)
        counts.append(clue.facts)
    assert counts == [{"oom_kill": 0}, {"oom_kill": 2}, {"oom_kill": 0}]


def test_what_the_kernel_says_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = [(1000.0, "NVRM: Xid (PCI:0000:3d:00): 79, pid=77, GPU has fallen off the bus."), (1001.0, "eth0: link up")]
    monkeypatch.setattr(witness.KernelLog, "read", lambda _: said)
    (tmp_path / "slot1.err").write_text("RuntimeError: CUDA error: unspecified launch failure\n")
    first = Witness("a").clues_of([tmp_path / "slot1.err"], rank=1)[0]
    assert (first.source, first.kind, first.time, first.facts["code"]) == ("kernel log", "xid", 1000.0, 79)


def test_outputs_are_read_when_it_is_time_and_at_the_latest_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "slot0.err").write_text(TRACE)
    sent: list[WorkerEvidence] = []

    async def scenario() -> None:
        last_words = LastWords(Witness("a#1"), sent.append)
        last_words.add(0, (tmp_path / "slot0.err",))
        await asyncio.sleep(0)
        assert sent == [] and not last_words._tasks
        last_words.give()
        last_words.add(1, ())
        await last_words.close()

    asyncio.run(scenario())
    assert sorted(one.slot for one in sent) == [0, 1]


def test_what_cannot_be_read_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a rule is broken")

    sent: list[WorkerEvidence] = []

    async def scenario() -> None:
        last_words = LastWords(Witness("a#1"), sent.append)
        last_words.add(0, ())
        await last_words.close()

    monkeypatch.setattr(witness, "diagnose", fail)
    asyncio.run(scenario())
    assert sent == []
