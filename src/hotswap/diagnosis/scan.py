"""Finds the few lines of a log that matter, at the speed of the disk.

Logs repeat themselves: the same few sentences with other numbers. So a block is stripped of everything that is only a
number (digits and the letters of hexadecimal ones), cut into lines, and each *template* that has not been seen before is
searched once for the literals the rules need. Deleting characters from a line and from the literal alike keeps every
occurrence, so nothing is lost, only a few lines too many are kept; whoever reads the lines decides. All steps over the whole
block are single calls into C. Text that never repeats (samples, base64) has a new template in every line; such batches are
searched by grep where there is one.

A flood of errors says little after the first thousand lines: a template, and where the words change, a literal that was found
very often is no longer looked for. Lines with any other literal are found as before, also with one that this literal is only a
part of ("LustreError" after a thousand lines with "Error"), and now and then a line of the flood is.

Memory does not grow with the log: a block or two, what grep answers to one, and the templates (64 MiB if all are as long as
they may be).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice
from typing import BinaryIO

from hotswap.diagnosis.find import GRAM, Finder
from hotswap.diagnosis.literals import NOISE, without_noise
from hotswap.diagnosis.sieve import Sieve, grep_command

BLOCK_BYTES = 1 << 20
LITERAL_BYTES_MIN = GRAM
"""What must be left of a literal; with less, most lines would contain it."""
LINE_BYTES_MAX = 1 << 16
"""Longer lines are cut here; what was cut off is looked at as a line of its own."""
OVERLAP_BYTES = 256
"""A cut line's pieces share this much, so that no literal is lost at the cut."""
TEMPLATES_MAX = 1 << 16
"""Templates known to be of no interest; forgotten all at once when there are more."""
BATCH_MIN = 256
"""New templates of one block from which on they are given to grep."""
NOISY_SHARE = 0.3
"""With more new templates than this among the lines of a block, templates cost more than they save."""
NOISY_BLOCKS = 60
"""Blocks that are then given to grep as they are, before templates are tried again."""
PIECE_BYTES = 64 << 10
"""grep gets so much at a time while literals wear out, and twice as much each time that none has: of a flood, it tells every line
until it is told not to."""
HOT_MAX = 64
"""Literals that are asked for first, one by one, because they have been found before."""
TEMPLATE_LINES_MAX = 1000
"""Lines of one template that are all handed on. A message printed a million times says after a thousand all that it has to say."""
LITERAL_LINES_MAX = 1000
"""The same for lines that share a literal but no template (names and paths instead of numbers). After that the literal is *worn
out*: it alone makes no line interesting any more. Longer literals that it is a part of do."""
SAMPLE_BLOCKS = 16
"""In every 16th block of a flood, lines are looked at whether or not they were left out for these two reasons …"""
SAMPLE_BYTES = 80 << 10
"""… one in so many bytes: a flood may bring something new late."""
TEMPLATE_BYTES_MAX = 512
"""Longer templates are searched each time instead of being remembered, which bounds the memory for them to 32 MiB."""


class Scanner:
    """Yields the lines that contain one of the literals, with their byte offsets. Keeps its memory from file to file."""

    def __init__(self, literals: Iterable[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        """Looks for any of *literals*, which must not consist of digits and the letters a to f alone."""
        literals = tuple(literals)
        self._whole = tuple(sorted(literal.encode() for literal in literals))
        stripped = {without_noise(literal) for literal in literals}
        if not stripped or min(map(len, stripped)) < LITERAL_BYTES_MIN:
            raise ValueError("a literal without three characters beside digits and a-f finds too much")
        self._block_bytes = block_bytes
        self._piece_bytes = PIECE_BYTES
        self._dull: set[bytes] = set()
        self._noisy_blocks = 0
        self._told: dict[bytes, int] = {}
        self._worn: dict[bytes, int] = dict.fromkeys(self._whole, 0)
        self._hot: list[bytes] = []
        self._finder = Finder(self._whole)
        self._shorter = {one: [other for other in self._finder.within(one) if other != one] for one in self._whole}
        self._sieve: Sieve | None = None
        self._blocks = 0
        self._flooded = False
        self.bytes_read = 0
        self._wear_out()

    def _wear_out(self) -> None:
        """Keeps only literals that have not been found too often as the ones to look for, the shortest that find all of them."""
        self._open = tuple(
            literal
            for literal in self._whole
            if self._is_open(literal) and not any(map(self._is_open, self._shorter[literal]))
        )
        self._open_stripped = tuple(sorted({literal.translate(None, NOISE) for literal in self._open}))
        self._hot = [literal for literal in self._hot if self._is_open(literal)]
        self._let_go_of_grep()
        self._piece_bytes = PIECE_BYTES

    def _is_open(self, literal: bytes) -> bool:
        return self._worn[literal] < LITERAL_LINES_MAX

    def _let_go_of_grep(self) -> None:
        if self._sieve is not None:
            self._sieve.close()
            self._sieve = None

    @cached_property
    def _grep(self) -> tuple[bytes, ...] | None:
        """How to ask grep, found out when it is needed first."""
        return grep_command()

    def lines(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset of the line in the stream, the line without its end) for each line of interest."""
        rest = b""
        start = 0
        try:
            while block := stream.read(self._block_bytes):
                self.bytes_read += len(block)
                whole, rest = _split_at_last_line_end(rest, block)
                if whole:
                    yield from self._of_block(whole, start)
                start += len(whole)
            if rest:
                yield from self._of_block(rest, start)
        finally:
            self._let_go_of_grep()

    def _of_block(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        self._blocks += 1
        sampled = self._flooded and self._blocks % SAMPLE_BLOCKS == 0
        handed_on = set()
        for offset, line in self._news(block, start):
            handed_on.add(offset)
            yield offset, line.rstrip(b"\r\n")
        if sampled:
            for offset, line in _some_lines(block, start):
                if offset not in handed_on and self._finder.within(line):
                    yield offset, line.rstrip(b"\r\n")

    def _news(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        """Lines of interest without those that say only what was said too often."""
        if self._noisy_blocks:
            self._noisy_blocks -= 1
            return self._by_grep(block, start)
        templates = block.translate(None, NOISE).splitlines()
        unknown = set(templates) - self._dull
        if len(unknown) > max(BATCH_MIN, NOISY_SHARE * len(templates)) and self._grep is not None:
            self._noisy_blocks = NOISY_BLOCKS
            return self._by_grep(block, start)
        return self._by_template(block, start, templates, unknown)

    def _by_template(
        self, block: bytes, start: int, templates: list[bytes], unknown: set[bytes]
    ) -> Iterator[tuple[int, bytes]]:
        lively = self._lively(unknown)
        if not lively:
            return
        offset = start
        lines = block.splitlines(keepends=True)
        if len(lines) != len(templates):
            # "7%\r5\n" loses its 5, and the two line ends become one.
            templates = [line.translate(None, NOISE).rstrip(b"\r\n") for line in lines]
            lively = self._lively(set(templates) - self._dull)
        for line, template in zip(lines, templates, strict=True):
            if template in lively and self._is_news(template) and self._charge(line):
                yield offset, line
            offset += len(line)

    def _by_grep(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        """The same for a block of text that does not repeat itself, of which templates say nothing."""
        at = 0
        while at < len(block) and self._open:
            piece = block[at : _line_end(block, at + self._piece_bytes)]
            self._piece_bytes = min(2 * self._piece_bytes, self._block_bytes)
            found = self._let_through(piece)
            if found is None:
                yield from self._without_grep(block[at:], start + at)
                return
            for offset, line in found:
                # Dull or not: where grep finds the lines, only wearing out its literals helps.
                if self._charge(line) and self._is_news(line.translate(None, NOISE).rstrip(b"\r\n")):
                    yield start + at + offset, line
            at += len(piece)

    def _without_grep(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        templates = block.translate(None, NOISE).splitlines()
        return self._by_template(block, start, templates, set(templates) - self._dull)

    def _let_through(self, piece: bytes) -> list[tuple[int, bytes]] | None:
        """(offset, line) of those that grep finds; None from the time on when it could not be asked."""
        if self._grep is None:
            return None
        try:
            if self._sieve is None:
                self._sieve = Sieve(self._grep, self._open)
            found = self._sieve.lines(piece)
        except OSError:
            self._let_go_of_grep()
            self._grep, self._noisy_blocks = None, 0
            return None
        return [line for offset, text in found for line in _all_lines(text, offset)]

    def _charge(self, line: bytes) -> bool:
        """Counts the line for the literals in it that are still looked for; whether there is one."""
        literals = [literal for literal in self._hot if literal in line]
        if not literals:
            literals = [literal for literal in self._finder.within(line) if self._is_open(literal)]
            self._hot = (literals + self._hot)[:HOT_MAX]
        for literal in literals:
            self._worn[literal] += 1
        if not all(map(self._is_open, literals)):
            self._flooded = True
            self._wear_out()
        return bool(literals)

    def _is_news(self, template: bytes) -> bool:
        if len(template) > TEMPLATE_BYTES_MAX:
            return True
        told = self._told.get(template, 0)
        if not told and len(self._told) >= TEMPLATES_MAX:
            self._told.clear()
        self._told[template] = told + 1
        if told < TEMPLATE_LINES_MAX:
            return True
        self._flooded = True
        self._remember_dull(template)
        return False

    def _remember_dull(self, template: bytes) -> None:
        if len(self._dull) >= TEMPLATES_MAX:
            self._dull.clear()
        self._dull.add(template)

    def _lively(self, templates: set[bytes]) -> set[bytes]:
        """Those that contain a literal; the others are remembered as dull."""
        known = {template for template in templates if template in self._told}
        new = [template for template in templates if template not in known]
        found = self._searched(new)
        for template in new:
            if template not in found and len(template) <= TEMPLATE_BYTES_MAX:
                self._remember_dull(template)
        return known | found

    def _searched(self, templates: list[bytes]) -> set[bytes]:
        """A log that hardly repeats itself makes many templates at once, and for many grep is quicker than we are."""
        if not self._open_stripped:
            return set()
        if len(templates) >= BATCH_MIN and self._grep is not None:
            try:
                with closing(Sieve(self._grep, self._open_stripped)) as sieve:
                    return {template for _, template in sieve.lines(b"\n".join(templates))}
            except OSError:
                self._grep = None
        return {template for template in templates if any(literal in template for literal in self._open_stripped)}


def _all_lines(text: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    for line in text.splitlines(keepends=True):
        yield offset, line
        offset += len(line)


def _some_lines(block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(block):
        end = _line_end(block, at)
        yield from islice(_all_lines(block[at:end], start + at), 1)
        at = _line_end(block, end + SAMPLE_BYTES)


def _line_end(block: bytes, least: int) -> int:
    """Where the line ends in which *least* lies, or the block."""
    return block.find(b"\n", least) + 1 or len(block)


def _split_at_last_line_end(rest: bytes, block: bytes) -> tuple[bytes, bytes]:
    """(whole lines, start of an unfinished one) of both together; a line without end is cut rather than kept for ever."""
    end = block.rfind(b"\n", -LINE_BYTES_MAX) + 1
    if end:
        return b"".join((rest, memoryview(block)[:end])), block[end:]
    block = rest + block
    end = max(block.rfind(b"\n"), block.rfind(b"\r", max(0, len(block) - LINE_BYTES_MAX), len(block) - 1)) + 1
    if len(block) - end > LINE_BYTES_MAX:
        cut = len(block) - OVERLAP_BYTES
        return block[:cut], block[cut:]
    return block[:end], block[end:]
