"""One grep for many blocks finds what a plain search finds, and one that fails costs time, not lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import scan, sieve

LITERALS = (b"NVRM: Xid", b"a|b(c) [x]*y", b"out of memory")
COMMAND = sieve.grep_command()
pytestmark = pytest.mark.skipif(COMMAND is None, reason="no GNU grep: what replaces it is tested with the scanner")


@pytest.fixture(scope="module")
def shared() -> Iterator[sieve.Sieve]:
    """One for all examples: what one leaves behind would show in the next."""
    assert COMMAND is not None
    with closing(sieve.Sieve(COMMAND, LITERALS)) as made:
        yield made


WORDS = st.sampled_from([*LITERALS, b"out of", b"\n", b"\r", b"\x00", b"\xff", b"12:", b"step", b""])


@settings(deadline=None)
@given(block=st.lists(WORDS, max_size=30).map(b"".join))
def test_the_same_as_a_plain_search(shared: sieve.Sieve, block: bytes) -> None:
    expected = []
    offset = 0
    for line in block.split(b"\n"):
        if any(literal in line for literal in LITERALS):
            expected.append((offset, line))
        offset += len(line) + 1
    assert shared.lines(block) == expected


def test_more_than_pipes_hold_passes_in_both_directions(shared: sieve.Sieve) -> None:
    block = b"".join(b"%d out of memory\n" % number for number in range(300_000))
    found = shared.lines(block)
    assert b"".join(line + b"\n" for _, line in found) == block
    assert shared.lines(b"nothing\n" * 100_000) == []
    assert shared.lines(b"x" * (3 << 20) + b"out of memory") == [(0, b"x" * (3 << 20) + b"out of memory")]


def test_a_grep_that_ends_is_said() -> None:
    assert COMMAND is not None
    broken = sieve.Sieve((*COMMAND, b"--no-such-option"), LITERALS)
    with closing(broken), pytest.raises(OSError, match=r"grep ended with .*no-such-option"):
        broken.lines(b"x\n" * (1 << 20))


def test_a_grep_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "ANSWER_SECONDS", 0.2)
    silent = sieve.Sieve((b"/bin/sh", b"-c", b"exec sleep 60"), LITERALS)
    with closing(silent), pytest.raises(OSError, match="nothing for"):
        silent.lines(b"x\n")


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_lines_are_found_without_a_grep_that_failed(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answer = sieve.Sieve.lines

    def failing(self: sieve.Sieve, block: bytes) -> list[tuple[int, bytes]]:
        asked.append(len(block))
        if len(asked) > blocks:
            self._process.kill()
        return answer(self, block)

    monkeypatch.setattr(sieve.Sieve, "lines", failing)
    lines = [bytes([103 + a, 103 + b, 103 + c]) for a in range(20) for b in range(20) for c in range(20)]
    for place in (0, 2000, 4000, 7999):
        lines[place] += b" out of memory"
    found = list(scan.Scanner(["out of memory", "NVRM: Xid"], block_bytes=4096).lines(io.BytesIO(b"\n".join(lines))))
    assert [line for _, line in found] == [lines[place] for place in (0, 2000, 4000, 7999)]
    assert len(asked) == blocks + 1, "it is not asked again"


def test_a_grep_that_cannot_be_started_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scanner = scan.Scanner(["out of memory"], block_bytes=4096)
    scanner._grep = (b"/nonexistent/grep",)
    lines = [bytes([103 + a, 103 + b, 103 + c]) for a in range(15) for b in range(15) for c in range(15)]
    data = b"\n".join([*lines, b"out of memory", *lines])
    assert [line for _, line in scanner.lines(io.BytesIO(data))] == [b"out of memory"]
    assert scanner._grep is None
