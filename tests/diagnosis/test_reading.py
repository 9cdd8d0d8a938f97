"""Prefixes, decoders and readers: what is taken off a line, what is understood of it, where it is found."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import Evidence, diagnose
from hotswap.diagnosis.decode import decode, pci_address, size_bytes
from hotswap.diagnosis.literals import minimal, required_literals
from hotswap.diagnosis.prefixes import read_label
from hotswap.diagnosis.readers import Reader, default_book, read_paths, read_text
from hotswap.diagnosis.structured import read_structured
from hotswap.errors import UsageError

NOON = 1772452800.0  # 2026-03-02 12:00:00 UTC


@pytest.mark.parametrize(
    ("line", "rank", "node", "time", "text"),
    [
        ("[rank3]: ValueError: x", 3, None, None, "ValueError: x"),
        ("[rank3]:[rank3]: ValueError: x", 3, None, None, "ValueError: x"),
        ("[default7]: hello there", None, None, None, "hello there"),
        ("3: hello there", 3, None, None, "hello there"),
        (" 7: [rank80]: hello", 80, None, None, "hello"),
        ("[1,4]<stderr>:hello", 4, None, None, "hello"),
        ("[pod/trainer-2/main] hello", None, "trainer-2", None, "hello"),
        ("(Worker pid=144, ip=10.0.0.24) hello", None, "10.0.0.24", None, "hello"),
        ("(RayWorkerWrapper pid=144) hello", None, None, None, "hello"),
        ("node-18:95:154 [0] NCCL WARN x", None, "node-18", None, "[0] NCCL WARN x"),
        ("node-1: RuntimeError: x", None, "node-1", None, "RuntimeError: x"),
        ("nvidia-nvswitch0: SXid x", None, None, None, "nvidia-nvswitch0: SXid x"),
        ("2026-03-02 12:00:00,500 - root - hello", None, None, NOON + 0.5, "- root - hello"),
        ("2026-03-02T14:00:00+02:00 hello", None, None, NOON, "hello"),
        ("[Mon Mar  2 12:00:00 2026] NVRM: x", None, None, NOON, "NVRM: x"),
        ("[12345.678901] NVRM: x", None, None, None, "NVRM: x"),
        ("Mar  2 12:00:00 gpu-node-4 kernel: NVRM: x", None, "gpu-node-4", NOON, "kernel: NVRM: x"),
        ("W0302 12:00:00.250000 77 torch/x.py:1] hello", None, None, NOON + 0.25, "W0302 12:00:00.250000 77 torch/x.py:1] hello"),
        ("[PG ID 1 PG GUID 1 Rank 5] hello", 5, None, None, "[PG ID 1 PG GUID 1 Rank 5] hello"),
        ("2026-13-45 99:99:99 hello", None, None, None, "hello"),
        ("12 monkeys: hello", None, None, None, "12 monkeys: hello"),
    ],
)  # fmt: skip
def test_prefixes(line: str, rank: int | None, node: str | None, time: float | None, text: str) -> None:
    label = read_label(line, year=2026)
    assert (label.rank, label.node, label.time, label.text) == (rank, node, time, text)


PIECES = st.lists(
    st.sampled_from(
        [
            "[rank3]: ",
            "[default1]:",
            "2: ",
            "node-7:1:2 [0] ",
            "2026-03-02 12:00:00 ",
            "[1,0]<stderr>:",
            "\x00",
            "é",
            "E0101 ",
        ]
    )
    | st.text(max_size=12),
    max_size=8,
).map("".join)


@settings(deadline=None)
@given(PIECES)
def test_any_line_can_be_labelled_and_loses_only_its_front(line: str) -> None:
    label = read_label(line, year=2026)
    assert line.rstrip().endswith(label.text)
    assert label.rank is None or label.rank >= 0


@settings(deadline=None)
@given(PIECES)
def test_any_line_can_be_decoded(line: str) -> None:
    kind, facts = decode(line)
    assert kind and isinstance(facts, dict)


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["ALLREDUCE", "_ALLGATHER_BASE"]),
    st.integers(0, 4096),
)
def test_collective_timeouts_come_back_as_they_were_printed(seq: int, size: int, op: str, rank: int) -> None:
    line = (
        f"[PG ID 3 PG GUID 12 Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600070 milliseconds before timing out."
    )
    assert decode(line) == (
        "collective_timeout",
        {"seq": seq, "op": op, "ran_ms": 600070, "numel_in": size, "numel_out": size, "group": "12"},
    )


@settings(deadline=None)
@given(st.integers(1, 999), st.integers(0, 255), st.integers(0, 255), st.integers(1, 10**6))
def test_xids_come_back_as_they_were_printed(code: int, bus: int, device: int, pid: int) -> None:
    kind, facts = decode(f"NVRM: Xid (PCI:0000:{bus:02X}:{device:02x}): {code}, pid={pid}, name=python3, Ch 00000008")
    assert kind == "xid"
    assert (facts["code"], facts["gpu"], facts["pid"]) == (code, f"0000:{bus:02x}:{device:02x}", pid)


@settings(deadline=None)
@given(st.integers(-64, 255).filter(bool))
def test_exit_codes(code: int) -> None:
    kind, facts = decode(f"failed (exitcode: {code}) local_rank: 3 (pid: 77) of binary: python")
    assert (kind, facts["local_rank"], facts["pid"]) == ("exit", 3, 77)
    number = -code if code < 0 else code - 128 if code > 128 else None
    assert facts.get("signal") == number


@pytest.mark.parametrize(
    ("line", "kind", "facts"),
    [
        ("exits with return code = -9", "exit", {"signal": 9}),
        ("process 0 terminated with signal SIGKILL", "exit", {"signal": 9}),
        ("process 0 terminated with signal SIGNONSENSE", "line", {}),
        ("died with <Signals.SIGSEGV: 11>.", "exit", {"signal": 11}),
        ("  exitcode  : -9 (pid: 5)", "exit", {"signal": 9, "pid": 5}),
        ("exited with exit code 0", "line", {}),
        ("srun: error: n4: task 3: Exited with exit code 139", "exit", {"node": "n4", "signal": 11}),
        (
            "mpirun noticed that process rank 3 with PID 0 on node n4 exited on signal 9 (Killed).",
            "exit",
            {"node": "n4", "rank": 3, "signal": 9},
        ),
        ("Stalled ops: x [missing ranks: 1, 4]", "stall", {"missing": "1, 4"}),
        ("Sending process 4 closing signal SIGTERM", "closing", {"pid": 4, "signal": "SIGTERM"}),
        ("last enqueued work: 7, last completed work: 5", "collective_state", {"enqueued": 7, "completed": 5}),
        ("Got completion from peer 10.0.0.1<5> with error 12, opcode 1, len 0, vendor err 129", "ib_completion",
         {"peer": "10.0.0.1", "status": 12, "vendor_err": 129}),
        ("iteration 7/ 10 | lm loss: nonsense |", "progress", {"step": 7}),
        ("pkg.mod.OddError: what", "exception", {"type": "OddError", "family": "other", "message": "what"}),
    ],
)  # fmt: skip
def test_decoders(line: str, kind: str, facts: dict[str, object]) -> None:
    assert decode(line) == (kind, facts)


def test_sizes_and_addresses() -> None:
    assert size_bytes("1.5", "GiB") == 3 << 29
    assert size_bytes("1.2.3", "GiB") == 0
    assert pci_address("PCI:00000000:3D:00.0") == "0000:3d:00"
    assert pci_address("no address") == ""


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("abc", {"abc"}),
        ("(?:Stale|stale) file", {"Stale file", "stale file"}),
        (r"\d+ bytes? of", {" byte of", " bytes of"}),
        ("[Ff]ail", {"Fail", "fail"}),
        ("a|", set()),
        (r"\w+", set()),
        ("(?i:abc)def", {"def"}),
        ("x*yyy", {"yyy"}),
        ("(?:one|two)+", {"one", "two"}),
        (r"one.*three", {"three"}),
    ],
)
def test_required_literals(pattern: str, literals: set[str]) -> None:
    assert required_literals(pattern) == literals


def test_minimal_keeps_what_finds_all() -> None:
    assert minimal(frozenset({"Xid", "NVRM: Xid", "oom"})) == {"Xid", "oom"}


def test_directories_tell_rank_and_node(tmp_path: Path) -> None:
    (tmp_path / "node-3" / "attempt_0" / "5").mkdir(parents=True)
    (tmp_path / "node-3" / "attempt_0" / "5" / "stderr.log").write_text("KeyError: 'x'\n", encoding="utf-8")
    (tmp_path / "rank_7.log").write_text("KeyError: 'y'\n", encoding="utf-8")
    found = {(one.rank, one.node) for one in read_paths([str(tmp_path)])}
    assert found == {(5, "node-3"), (7, None)}


def test_what_a_line_says_wins_over_its_path(tmp_path: Path) -> None:
    (tmp_path / "rank_7.log").write_text("[rank2]: KeyError: 'y'\n", encoding="utf-8")
    assert [one.rank for one in read_paths([str(tmp_path)])] == [2]


def test_compressed_files_are_read_and_damaged_ones_said(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.log.gz", "wb") as file:
        file.write(b"KeyError: 'x'\n")
    assert [one.kind for one in read_paths([str(tmp_path)])] == ["exception"]
    (tmp_path / "b.log.gz").write_bytes(b"this is not gzip")
    with pytest.raises(UsageError, match="cannot read"):
        list(read_paths([str(tmp_path)]))
    with pytest.raises(UsageError, match="no file or directory"):
        list(read_paths([str(tmp_path / "missing")]))


def test_error_files_of_the_launcher(tmp_path: Path) -> None:
    content = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "…", "timestamp": "1772452800"}}}
    path = tmp_path / "attempt_0" / "4" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    (found,) = read_paths([str(path)])
    assert (found.kind, found.rank, found.time) == ("exception", 4, NOON)
    assert read_structured(b"{}", source="x") is None
    assert read_structured(b"[1", source="x") is None
    assert _documented(b'{"message": "KeyError: 1"}').kind == "exception"
    assert _documented(b'{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}').time is None


def _documented(content: bytes) -> Evidence:
    (found,) = read_structured(content, source="x") or []
    return found


def test_json_that_is_no_error_file_is_a_log(tmp_path: Path) -> None:
    (tmp_path / "events.json").write_text('{"a": 1}\nKeyError: 1\n', encoding="utf-8")
    assert "exception" in {one.kind for one in read_paths([str(tmp_path)])}


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(content: bytes) -> None:
    evidence = list(Reader(default_book()).read_stream(io.BytesIO(content), source="x"))
    assert diagnose(evidence) is not None
    assert len(evidence) <= content.count(b"\n") + content.count(b"\r") + 1
    read_structured(content, source="x")


def test_equal_lines_are_counted_and_torn_ones_still_found() -> None:
    lines = [
        f"../Indexing.cu:1308: indexSelectLargeIndex: block: [{block},0,0], thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed."
        for block in range(30)
        for thread in range(30)
    ]
    torn = "block: [58,0,0], thread: [125../Indexing.cu:1308: indexSelectLargeIndex: block: [6,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    evidence = read_text("\n".join([*lines, torn]))
    assert evidence[0].count == 900
    assert len(evidence) <= 3
    assert diagnose(evidence).rules[0] == "cuda.device-assert"


def _large(failure: bytes, at: float, size: int = 3 << 20) -> bytes:
    line = b"[default7]: iteration %8d/ 9000 | lm loss: 2.%06d |\n"
    lines = b"".join(line % (number, number * 7 % 1000000) for number in range(size // len(line % (1, 1))))
    cut = lines.index(b"\n", int(at * len(lines)) - 1) + 1 if at else 0
    return lines[:cut] + failure + lines[cut:]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.9, 0.999])
def test_a_failure_anywhere_in_a_large_file_is_found_once(at: float, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(_large(b"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n", at))
    evidence = list(read_paths([str(path)]))
    hits = [one for one in evidence if "ECC" in one.text]
    assert [(one.rank, one.count) for one in hits] == [(3, 1)]
    content = path.read_bytes()
    offset = (hits[0].order - 2) // 2
    assert content[offset:].startswith(b"[rank3]: RuntimeError")
    assert diagnose(evidence).rules[0] == "gpu.ecc-uncorrectable"


def test_the_tail_of_a_large_file_gives_context(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(_large(b"", 0.0))
    assert any(one.kind == "progress" for one in read_paths([str(path)]))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(b"KeyError: 'x'\n")

    monkeypatch.setattr("sys.stdin", Input())
    (found,) = read_paths(["-"])
    assert isinstance(found, Evidence) and found.source == "standard input"
