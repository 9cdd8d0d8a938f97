"""Finds the few lines of a log that matter, at the speed of the disk.

Logs repeat themselves: the same few sentences with other numbers. So a block is stripped of everything that is only a
number (digits and the letters of hexadecimal ones), cut into lines, and each *template* that has not been seen before is
searched once for the literals the rules need. Deleting characters from a line and from the literal alike keeps every
occurrence, so nothing is lost, only a few lines too many are kept; whoever reads the lines decides. All steps over the whole
block are single calls into C. Text that never repeats (samples, base64) has a new template in every line; such batches are
searched by grep where there is one.

A flood of errors says little after the first thousand lines: a template, and where the words change, a literal that was found
very often is no longer looked for. Lines with any other literal are found as before, and now and then a line of the flood is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import BinaryIO

from hotswap.diagnosis.find import GRAM, Finder
from hotswap.diagnosis.literals import NOISE, without_noise

BLOCK_BYTES = 4 << 20
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
NOISY_FACTOR = 4
"""A block for grep is so many times larger: it takes longer to start than to read 4 MiB."""
NOISY_BLOCKS = 15
"""Blocks that are then given to grep as they are, before templates are tried again."""
TEMPLATE_LINES_MAX = 1000
"""Lines of one template that are all handed on. A message printed a million times says after a thousand all that it has to say."""
LITERAL_LINES_MAX = 2048
"""The same for lines that share a literal but no template (names and paths instead of numbers). After that the literal is *worn
out*: it alone makes no line interesting any more."""
SAMPLE_BLOCKS = 16
"""In every 16th block, lines that are left out for these two reasons are looked at again …"""
SAMPLE_LINES = 512
"""… one in so many of them: a flood may bring something new late."""
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
        self._dull: set[bytes] = set()
        self._noisy_blocks = 0
        self._told: dict[bytes, int] = {}
        self._worn: dict[bytes, int] = dict.fromkeys(self._whole, 0)
        self._finder = Finder(self._whole)
        self._blocks = 0
        self._flooded = False
        self.bytes_read = 0
        self._wear_out()

    def _wear_out(self) -> None:
        """Keeps only literals that have not been found too often as the ones to look for."""
        self._open = tuple(literal for literal in self._whole if self._worn[literal] < LITERAL_LINES_MAX)
        self._open_stripped = tuple(sorted({literal.translate(None, NOISE) for literal in self._open}))

    @cached_property
    def _grep(self) -> tuple[bytes, ...] | None:
        """How to ask grep, found out when it is needed first."""
        return _grep_command()

    def lines(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset of the line in the stream, the line without its end) for each line of interest."""
        rest = b""
        start = 0
        while block := stream.read(self._block_bytes * (NOISY_FACTOR if self._noisy_blocks else 1)):
            self.bytes_read += len(block)
            block = rest + block
            whole, rest = _split_at_last_line_end(block)
            if whole:
                yield from self._of_block(whole, start)
            start += len(block) - len(rest)
        if rest:
            yield from self._of_block(rest, start)

    def _of_block(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        self._blocks += 1
        sampled = self._flooded and self._blocks % SAMPLE_BLOCKS == 0
        handed_on = set()
        for offset, line in self._news(block, start):
            handed_on.add(offset)
            yield offset, line
        if sampled and self._grep is not None:
            part, _ = _split_at_last_line_end(block[: self._block_bytes])
            flood = self._by_grep(self._grep, part, start, self._whole)
            for offset, line in islice(flood, 0, None, SAMPLE_LINES):
                if offset not in handed_on:
                    yield offset, line.rstrip(b"\r\n")

    def _news(self, block: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        """Lines of interest without those that say only what was said too often."""
        while block:
            rest = yield from self._news_until_less(block, start)
            block, start = block[rest:], start + rest

    def _news_until_less(self, block: bytes, start: int) -> Generator[tuple[int, bytes], None, int]:
        """The same up to where less is looked for than at the beginning: many of the other candidates are none any more."""
        for offset, line, template in self._candidates(block, start):
            news = self._is_news(template)
            if not news and not self._noisy_blocks:
                continue  # The template is dull from now on. Where grep finds the lines, only wearing out its literals helps.
            literals = self._literals_in(line)
            if not literals:
                continue
            looked_for = len(self._open)
            self._charge(literals)
            if news:
                yield offset, line.rstrip(b"\r\n")
            if len(self._open) < looked_for:
                return offset - start + len(line)
        return len(block)

    def _candidates(self, block: bytes, start: int) -> Iterator[tuple[int, bytes, bytes]]:
        """(offset, line, its template) of each line that may be of interest."""
        if self._noisy_blocks and self._grep is not None:
            self._noisy_blocks -= 1
            yield from self._without_templates(self._grep, block, start)
            return
        templates = block.translate(None, NOISE).splitlines()
        unknown = set(templates) - self._dull
        if len(unknown) > max(BATCH_MIN, NOISY_SHARE * len(templates)) and self._grep is not None:
            self._noisy_blocks = NOISY_BLOCKS
            yield from self._without_templates(self._grep, block, start)
            return
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
            if template in lively:
                yield offset, line, template
            offset += len(line)

    def _without_templates(
        self, grep: tuple[bytes, ...], block: bytes, start: int
    ) -> Iterator[tuple[int, bytes, bytes]]:
        for offset, line in self._by_grep(grep, block, start, self._open):
            yield offset, line, line.translate(None, NOISE).rstrip(b"\r\n")

    def _literals_in(self, line: bytes) -> list[bytes]:
        """Those of the literals still looked for that are in *line*."""
        return [literal for literal in self._finder.within(line) if self._worn[literal] < LITERAL_LINES_MAX]

    def _charge(self, literals: list[bytes]) -> None:
        for literal in literals:
            self._worn[literal] += 1
            if self._worn[literal] >= LITERAL_LINES_MAX:
                self._flooded = True
                self._wear_out()

    def _by_grep(
        self, grep: tuple[bytes, ...], block: bytes, start: int, literals: tuple[bytes, ...]
    ) -> Iterator[tuple[int, bytes]]:
        """The same for a block of text that does not repeat itself, of which templates say nothing."""
        if not literals:
            return
        done = subprocess.run(
            (*grep, b"-b", b"-e", _alternatives(literals)), input=block, capture_output=True, check=False, env=_PLAIN
        )
        if done.returncode not in (0, 1):
            raise OSError(f"grep failed: {done.stderr.decode('utf-8', 'replace')[:200]}")
        for found in done.stdout.split(b"\n")[:-1]:
            place, _, line = found.partition(b":")
            offset = start + int(place)
            pieces = line.splitlines(keepends=True)
            for piece in pieces:
                if len(pieces) == 1 or any(literal in piece for literal in literals):
                    yield offset, piece
                offset += len(piece)

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
            batch = b"\n".join(template.replace(b"\r", b" ") for template in templates) + b"\n"
            command = (*self._grep, b"-n", b"-e", _alternatives(self._open_stripped))
            done = subprocess.run(command, input=batch, capture_output=True, check=False, env=_PLAIN)
            if done.returncode in (0, 1):
                return {templates[int(line.partition(b":")[0]) - 1] for line in done.stdout.splitlines()}
        return {template for template in templates if any(literal in template for literal in self._open_stripped)}


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
