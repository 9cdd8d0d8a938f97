"""The scanner loses no line that a plain search would find, whatever the blocks, and keeps offsets right."""

from __future__ import annotations

import io

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
    assert found[:2000] == [b"%s: out of memory" % words for words in WORDY[:2000]], "the first ones are all there"
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
