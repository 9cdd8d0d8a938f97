"""Finds the few lines of a log that matter, at the speed of the disk.

Logs repeat themselves: the same few sentences with other numbers. So a block is stripped of everything that is only a
number (digits and the letters of hexadecimal ones), cut into lines, and each *template* that has not been seen before is
searched once for the literals the rules need. Deleting characters from a line and from the literal alike keeps every
occurrence, so nothing is lost, only a few lines too many are kept; whoever reads the lines decides. All steps over the whole
block are single calls into C. Text that never repeats (samples, base64) has a new template in every line; such batches are
searched by grep where there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import BinaryIO

from hotswap.diagnosis.literals import NOISE, without_noise

BLOCK_BYTES = 4 << 20
LITERAL_BYTES_MIN = 3
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
NOISY_BLOCKS = 15
"""Blocks that are then given to grep as they are, before templates are tried again."""
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
        literals = tuple(literals)
        self._whole = tuple(sorted(literal.encode() for literal in literals))
        stripped = {without_noise(literal) for literal in literals}
        if not stripped or min(map(len, stripped)) < LITERAL_BYTES_MIN:
            raise ValueError("a literal without three characters beside digits and a-f finds too much")
        self._literals = tuple(sorted(stripped))
        self._block_bytes = block_bytes
        self._dull: set[bytes] = set()
        self._noisy_blocks = 0
        self._told: dict[bytes, int] = {}
        self.bytes_read = 0

    @cached_property
    def _grep(self) -> tuple[bytes, ...] | None:
        """How to ask grep, found out when it is needed first."""
        return _grep_command()

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
        if self._noisy_blocks and self._grep is not None:
            self._noisy_blocks -= 1
            yield from self._by_grep(self._grep, block, start)
            return
        templates = block.translate(None, NOISE).splitlines()
        unknown = set(templates) - self._dull
        if len(unknown) > max(BATCH_MIN, NOISY_SHARE * len(templates)):
            self._noisy_blocks = NOISY_BLOCKS
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
            if template in lively and self._is_news(template) and any(literal in line for literal in self._whole):
                yield offset, line.rstrip(b"\r\n")
            offset += len(line)

    def _by_grep(self, grep: tuple[bytes, ...], block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        """The same for a block of text that does not repeat itself, of which templates say nothing."""
        done = subprocess.run(
            (*grep, b"-b", b"-e", _alternatives(self._whole)), input=block, capture_output=True, check=False, env=_PLAIN
        )
        if done.returncode not in (0, 1):
            raise OSError(f"grep failed: {done.stderr.decode('utf-8', 'replace')[:200]}")
        for found in done.stdout.split(b"\n")[:-1]:
            place, _, line = found.partition(b":")
            offset = start + int(place)
            for piece in line.splitlines(keepends=True):
                wanted = any(literal in piece for literal in self._whole)
                if wanted and self._is_news(piece.translate(None, NOISE)):
                    yield offset, piece.rstrip(b"\r\n")
                offset += len(piece)

    def _is_news(self, template: bytes) -> bool:
        if len(template) > TEMPLATE_BYTES_MAX:
            return True
        told = self._told.get(template, 0)
        if not told and len(self._told) >= TEMPLATES_MAX:
            self._told.clear()
        self._told[template] = told + 1
        return told < TEMPLATE_LINES_MAX or told % SAMPLE_EVERY == 0

    def _lively(self, templates: set[bytes]) -> set[bytes]:
        """Those that contain a literal; the others are remembered as dull."""
        known = {template for template in templates if template in self._told}
        new = [template for template in templates if template not in known]
        found = self._searched(new)
        for template in new:
            if template not in found and len(template) <= TEMPLATE_BYTES_MAX:
                if len(self._dull) >= TEMPLATES_MAX:
                    self._dull.clear()
                self._dull.add(template)
        return known | found

    def _searched(self, templates: list[bytes]) -> set[bytes]:
        """A log that hardly repeats itself makes many templates at once, and for many grep is quicker than we are."""
        if len(templates) >= BATCH_MIN and self._grep is not None:
            batch = b"\n".join(template.replace(b"\r", b" ") for template in templates) + b"\n"
            command = (*self._grep, b"-n", b"-e", _alternatives(self._literals))
            done = subprocess.run(command, input=batch, capture_output=True, check=False, env=_PLAIN)
            if done.returncode in (0, 1):
                return {templates[int(line.partition(b":")[0]) - 1] for line in done.stdout.splitlines()}
        return {template for template in templates if any(literal in template for literal in self._literals)}


_PLAIN = {"LC_ALL": "C"}


def _alternatives(literals: tuple[bytes, ...]) -> bytes:
    return b"|".join(re.sub(rb"([][\\.*^$+?(){}|])", rb"\\\1", literal) for literal in literals)


def _grep_command() -> tuple[bytes, ...] | None:
    """GNU grep; None where there is none, or it does not do what it should."""
    path = shutil.which("grep")
    if path is None:
        return None
    command = (os.fsencode(path), b"-a", b"-E")
    try:
        trial = (*command, b"-b", b"-e", b"x|\\[y")
        done = subprocess.run(trial, input=b"\xff[y\nz\n", capture_output=True, check=False, env=_PLAIN, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if done.stdout == b"0:\xff[y\n" else None


def _split_at_last_line_end(block: bytes) -> tuple[bytes, bytes]:
    """(whole lines, start of an unfinished one); a line without end is cut rather than kept for ever."""
    end = max(block.rfind(b"\n"), block.rfind(b"\r", max(0, len(block) - LINE_BYTES_MAX), len(block) - 1)) + 1
    if len(block) - end > LINE_BYTES_MAX:
        cut = len(block) - OVERLAP_BYTES
        return block[:cut], block[cut:]
    return block[:end], block[end:]
