"""The scanner loses no line that a plain search would find, whatever the blocks, and keeps offsets right."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Callable
from typing import BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import scan

LITERALS = ("NVRM: Xid", "out of memory", "Traceback (most", "dead peer")
WORDS = st.sampled_from(
    [*LITERALS, "out of", " memory", "Xid", "0x7f", "deadbeef", "step 17", "\r", "\n", "\r\n", "", "é"]
)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=40).map("".join), st.integers(1, 64))
def test_every_line_with_a_literal_is_found(text: str, block_bytes: int) -> None:
    data = text.encode()
    found = dict(scan.Scanner(LITERALS, block_bytes=block_bytes).lines(io.BytesIO(data)))
    offset = 0
    for line in data.splitlines(keepends=True):
        if any(literal.encode() in line for literal in LITERALS):
            assert found[offset] == line.rstrip(b"\r\n"), (offset, found)
        offset += len(line)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=40).map("".join), st.integers(1, 64))
def test_offsets_point_at_the_lines(text: str, block_bytes: int) -> None:
    data = text.encode()
    for offset, line in scan.Scanner(LITERALS, block_bytes=block_bytes).lines(io.BytesIO(data)):
        assert data[offset : offset + len(line)] == line


def test_dull_lines_are_left_out() -> None:
    data = b"".join(b"iteration %d loss 2.%d\n" % (number, number) for number in range(50_000)) + b"dead peer\n"
    scanner = scan.Scanner(LITERALS)
    assert [line for _, line in scanner.lines(io.BytesIO(data))] == [b"dead peer"]
    assert scanner.bytes_read == len(data)


def test_a_line_without_end_is_cut_and_still_searched() -> None:
    data = b"x" * (3 * scan.BLOCK_BYTES) + b"out of memory" + b"y" * scan.BLOCK_BYTES
    found = list(scan.Scanner(LITERALS).lines(io.BytesIO(data)))
    assert found and all(b"out of memory" in line for _, line in found)
    assert max(len(line) for _, line in found) <= 2 * scan.BLOCK_BYTES


def test_a_literal_on_the_cut_is_not_lost() -> None:
    for shift in range(len(b"out of memory") + 1):
        data = b"x" * (2 * scan.BLOCK_BYTES - shift) + b"out of memory" + b"z" * scan.BLOCK_BYTES
        assert list(scan.Scanner(LITERALS).lines(io.BytesIO(data))), shift


PROSE = tuple(
    bytes([103 + a, 104 + b, 105 + c, 32, 110 + d])
    for a in range(12)
    for b in range(12)
    for c in range(12)
    for d in range(2)
)


@pytest.mark.parametrize("with_grep", [True, False])
def test_lines_that_never_repeat_are_searched_too(with_grep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_grep:
        monkeypatch.setattr("shutil.which", lambda _: None)
    scanner = scan.Scanner(("NVRM: Xid", "a|b(c) [x]*y", "out of memory"))
    assert (scanner._grep is not None) is with_grep
    lines = [*PROSE[:1500], b"gpu 7: NVRM: Xid 79", *PROSE[1500:], b"za|b(c) [x]*yz", b"a|b(c) xy"]
    data = b"\n".join(lines)
    found = list(scanner.lines(io.BytesIO(data)))
    assert [line for _, line in found] == [b"gpu 7: NVRM: Xid 79", b"za|b(c) [x]*yz"]
    small = scan.Scanner(("NVRM: Xid", "a|b(c) [x]*y", "out of memory"), block_bytes=4096)
    assert list(small.lines(io.BytesIO(data))) == found
    assert (small._noisy_blocks > 0) is with_grep
    assert all(data[offset : offset + len(line)] == line for offset, line in found)


def test_a_grep_that_is_none_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/true")
    assert scan.Scanner(LITERALS)._grep is None


def test_of_a_message_printed_without_end_a_sample_is_handed_on() -> None:
    data = b"".join(b"worker %d: dead peer\n" % number for number in range(100_000)) + b"out of memory\n"
    found = [line for _, line in scan.Scanner(LITERALS).lines(io.BytesIO(data))]
    assert found[:1000] == [b"worker %d: dead peer" % number for number in range(1000)]
    assert 1000 < len(found) < 3000 and found[-1] == b"out of memory"


WORDY = [b"the %s of shelf %s" % (one, two) for one in PROSE[:200] for two in PROSE[:200]]


def test_a_literal_in_sentences_that_never_repeat_is_worn_out_and_then_sampled() -> None:
    flood = b"".join(b"%s: out of memory\n" % words for words in WORDY)
    data = flood * 20 + b"a dead peer at last\n" + flood
    scanner = scan.Scanner(LITERALS, block_bytes=1 << 18)
    found = [line for _, line in scanner.lines(io.BytesIO(data))]
    assert found[:1000] == [b"%s: out of memory" % words for words in WORDY[:1000]], "the first ones are all there"
    assert b"a dead peer at last" in found, "another literal is still looked for"
    later = [line for line in found[scan.LITERAL_LINES_MAX :] if b"out of memory" in line]
    assert 0 < len(later) < 2000, "a sample of the rest"


def test_a_flood_hides_nothing_that_comes_with_another_literal() -> None:
    flood = b"".join(b"worker %d: dead peer\n" % number for number in range(60_000))
    data = flood + b"worker 7: dead peer, out of memory\n" + flood
    assert b"worker 7: dead peer, out of memory" in [line for _, line in scan.Scanner(LITERALS).lines(io.BytesIO(data))]


def test_samples_of_a_flood_are_not_handed_on_twice() -> None:
    flood = b"".join(b"worker %d: dead peer\n" % number for number in range(400_000))
    offsets = [offset for offset, _ in scan.Scanner(LITERALS, block_bytes=1 << 16).lines(io.BytesIO(flood))]
    assert len(offsets) == len(set(offsets)) > scan.TEMPLATE_LINES_MAX


KINDS = (
    lambda number: b"worker %d: dead peer\n" % number,
    lambda number: b"the %s of shelf %d: out of memory\n" % (PROSE[number % len(PROSE)], number),
    lambda number: b"%s: Traceback (most %s\n" % (PROSE[number % 1000], PROSE[number % 999]),
    lambda number: b"no error, %s\n" % PROSE[number % len(PROSE)],
)
"""Floods: numbers change, words change, both ends change, nothing is looked for."""
DECISIVE = b"gpu-7 kernel: NVRM: Xid 79, dead peer, Traceback (most likely)"


@pytest.mark.parametrize("with_grep", [True, False])
@pytest.mark.parametrize("place", [0, 1, 998, 999, 1000, 1001, 1999, 5000, 11_998, 11_999])
def test_one_decisive_line_in_a_flood_is_found_wherever_it_stands(
    place: int, with_grep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_grep:
        monkeypatch.setattr("shutil.which", lambda _: None)
    for kinds in ((0,), (1,), (2,), (0, 1), (0, 1, 2, 3)):
        lines = [KINDS[kinds[number % len(kinds)]](number) for number in range(12_000)]
        lines.insert(place, DECISIVE + b"\n")
        found = list(scan.Scanner(LITERALS, block_bytes=1 << 16).lines(io.BytesIO(b"".join(lines))))
        assert (sum(map(len, lines[:place])), DECISIVE) in found, kinds
        assert len(found) < 7000, "and the flood is not told in full"


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 4000)), min_size=1, max_size=5),
    st.integers(0, 1 << 20),
    st.sampled_from([1 << 12, 1 << 14, 1 << 16, 1 << 20]),
    st.sampled_from([1 << 10, 1 << 13, 1 << 16]),
)
def test_floods_that_follow_each_other_hide_nothing_else(
    floods: list[tuple[Callable[[int], bytes], int]], place: int, block_bytes: int, piece_bytes: int
) -> None:
    data = b"".join(kind(number) for kind, lines in floods for number in range(lines))
    cut = data.rfind(b"\n", 0, place % len(data)) + 1
    data = data[:cut] + DECISIVE + b"\n" + data[cut:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "PIECE_BYTES", piece_bytes)
        found = list(scan.Scanner(LITERALS, block_bytes=block_bytes).lines(io.BytesIO(data)))
    assert (cut, DECISIVE) in found
    assert all(data[offset : offset + len(line)] == line for offset, line in found)
    assert len({offset for offset, _ in found}) == len(found)
    first = {kind: data.index(kind(0)) for kind, _ in floods if kind is not KINDS[3]}
    assert set(first.values()) <= {offset for offset, _ in found}, "the first line of each kind is told"


@pytest.mark.parametrize("shift", range(-3, 4))
def test_a_decisive_line_on_the_edge_of_a_block_or_a_piece_is_found(shift: int) -> None:
    flood = b"".join(b"%s: out of memory\n" % words for words in WORDY)
    for edge in (scan.PIECE_BYTES, 3 * scan.PIECE_BYTES, scan.BLOCK_BYTES):
        cut = flood.rfind(b"\n", 0, edge - 30) + 1
        fill = b"x" * (edge + shift - cut - len(DECISIVE)) + b"\n"
        data = flood[:cut] + fill + DECISIVE + b"\n" + flood[cut:]
        assert (cut + len(fill), DECISIVE) in list(scan.Scanner(LITERALS).lines(io.BytesIO(data))), edge


def test_no_line_is_lost_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE_BYTES", 1 << 9)
    lines = [b"out of memory: %s" % words for words in WORDY[: scan.LITERAL_LINES_MAX - 1]]
    data = b"\n".join(lines)
    found = list(scan.Scanner(LITERALS, block_bytes=1 << 14).lines(io.BytesIO(data)))
    assert [line for _, line in found] == lines
    assert all(data[offset : offset + len(line)] == line for offset, line in found)


@pytest.mark.parametrize("with_grep", [True, False])
def test_a_worn_out_literal_takes_none_with_it_that_it_is_a_part_of(
    with_grep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_grep:
        monkeypatch.setattr("shutil.which", lambda _: None)
    flood = b"".join(b"ERROR %s: KeyError\n" % words for words in WORDY[:8000])
    data = flood + b"kernel: LustreError: no answer\n" + flood + b"ValueError: too late\n" + flood
    scanner = scan.Scanner(["Error", "LustreError", "KeyError", "out of memory"], block_bytes=1 << 16)
    found = [line for _, line in scanner.lines(io.BytesIO(data))]
    assert b"kernel: LustreError: no answer" in found
    assert {b"Error", b"KeyError"}.isdisjoint(scanner._open) and b"LustreError" in scanner._open
    assert b"ValueError: too late" not in found, "only the worn-out literal is in it"


class Endless(io.RawIOBase):
    """A log of *size* bytes in words that never repeat, made while it is read."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.draw = random.Random(0)
        self.block = b"".join(b"%s: out of memory \x80\n" % words for words in WORDY)

    def read(self, size: int = -1) -> bytes:
        self.left -= size
        word = bytes(self.draw.choices(b"ghijklmnopq", k=9))
        return (self.block * (1 + size // len(self.block))).replace(b"\x80", word)[:size] if self.left > 0 else b""


@pytest.mark.parametrize(("with_grep", "mib"), [(True, 48), (False, 6)])
def test_memory_does_not_grow_with_the_log(with_grep: bool, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_grep:
        monkeypatch.setattr("shutil.which", lambda _: None)

    def peak(mib: int) -> int:
        tracemalloc.start()
        try:
            for _ in scan.Scanner(LITERALS).lines(cast(BinaryIO, Endless(mib << 20))):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(scan, "TEMPLATES_MAX", 1 << 12)
    small, large = peak(mib // 2), peak(mib)
    assert large < small + scan.BLOCK_BYTES, (small, large)
    assert large < 24 << 20, large


def test_memory_for_templates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "TEMPLATES_MAX", 100)
    monkeypatch.setattr("shutil.which", lambda _: None)
    scanner = scan.Scanner(LITERALS)
    lines = b"".join(bytes([103 + a, 103 + b, 103 + c, 10]) for a in range(15) for b in range(15) for c in range(15))
    assert list(scanner.lines(io.BytesIO(lines))) == []
    assert 0 < len(scanner._dull) <= 100


def test_literals_of_noise_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="finds too much"):
        scan.Scanner(["abc123"])
