"""Finds the few lines of a log that matter, at the speed of the disk.

Logs repeat themselves: the same few sentences with other numbers. So a block is stripped of everything that is only a
number (digits and the letters of hexadecimal ones), cut into lines, and each *template* that has not been seen before is
searched once for the literals the rules need. Deleting characters from a line and from the literal alike keeps every
occurrence, so nothing is lost, only a few lines too many are kept; whoever reads the lines decides. All steps over the whole
block are single calls into C.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from hotswap.diagnosis.literals import NOISE, without_noise

BLOCK_BYTES = 1 << 20
LITERAL_BYTES_MIN = 3
"""What must be left of a literal; with less, most lines would contain it."""
LINE_BYTES_MAX = 1 << 16
"""Longer lines are cut here; what was cut off is looked at as a line of its own."""
OVERLAP_BYTES = 256
"""A cut line's pieces share this much, so that no literal is lost at the cut."""
TEMPLATES_MAX = 1 << 16
"""Templates known to be of no interest; forgotten all at once when there are more."""
TEMPLATE_LINES_MAX = 1000
"""Lines of one template that are all handed on; of more, one in :data:`SAMPLE_EVERY`. A message printed a million times
says after a thousand all that it has to say."""
SAMPLE_EVERY = 64
TEMPLATE_BYTES_MAX = 512
"""Longer templates are searched each time instead of being remembered, which bounds the memory for them to 32 MiB."""


class Scanner:
    """Yields the lines that contain one of the literals, with their byte offsets. Keeps its memory from file to file."""

    def __init__(self, literals: Iterable[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        """Looks for any of *literals*, which must not consist of digits and the letters a to f alone."""
        stripped = {without_noise(literal) for literal in literals}
        if not stripped or min(map(len, stripped)) < LITERAL_BYTES_MIN:
            raise ValueError("a literal without three characters beside digits and a-f finds too much")
        self._search = re.compile(b"|".join(re.escape(literal) for literal in sorted(stripped))).search
        self._block_bytes = block_bytes
        self._dull: set[bytes] = set()
        self._told: dict[bytes, int] = {}
        self.bytes_read = 0

    def lines(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset of the line in the stream, the line without its end) for each line of interest."""
        rest = b""
        start = 0
        while block := stream.read(self._block_bytes):
            self.bytes_read += len(block)
            block = rest + block
            whole, rest = _split_at_last_line_end(block)
            if whole:
                yield from self._of_block(whole, start)
            start += len(block) - len(rest)
        if rest:
            yield from self._of_block(rest, start)

    def _of_block(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        templates = block.translate(None, NOISE).splitlines()
        lively = {template for template in set(templates) - self._dull if self._is_lively(template)}
        if not lively:
            return
        offset = start
        lines = block.splitlines(keepends=True)
        if len(lines) != len(templates):
            # "7%\r5\n" loses its 5, and the two line ends become one.
            templates = [line.translate(None, NOISE).rstrip(b"\r\n") for line in lines]
            lively.update(template for template in templates if self._search(template) is not None)
        for line, template in zip(lines, templates, strict=True):
            if template in lively and self._is_news(template):
                yield offset, line.rstrip(b"\r\n")
            offset += len(line)

    def _is_news(self, template: bytes) -> bool:
        if len(template) > TEMPLATE_BYTES_MAX:
            return True
        told = self._told.get(template, 0)
        if not told and len(self._told) >= TEMPLATES_MAX:
            self._told.clear()
        self._told[template] = told + 1
        return told < TEMPLATE_LINES_MAX or told % SAMPLE_EVERY == 0

    def _is_lively(self, template: bytes) -> bool:
        if self._search(template) is not None:
            return True
        if len(template) <= TEMPLATE_BYTES_MAX:
            if len(self._dull) >= TEMPLATES_MAX:
                self._dull.clear()
            self._dull.add(template)
        return False


def _split_at_last_line_end(block: bytes) -> tuple[bytes, bytes]:
    """(whole lines, start of an unfinished one); a line without end is cut rather than kept for ever."""
    end = max(block.rfind(b"\n"), block.rfind(b"\r", max(0, len(block) - LINE_BYTES_MAX), len(block) - 1)) + 1
    if len(block) - end > LINE_BYTES_MAX:
        cut = len(block) - OVERLAP_BYTES
        return block[:cut], block[cut:]
    return block[:end], block[end:]
