"""Reads evidence from where failures leave it: rank logs, launcher logs, kernel logs, error files, scheduler output.

Small files are read whole; of large ones only the lines that a rule or decoder may want, plus the tail, which is where the
progress of the training and the last words stand. Memory is bounded whatever the size: equal lines are counted, not kept.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, cast

from hotswap.diagnosis import exceptions
from hotswap.diagnosis.cause import RuleBook, default_book
from hotswap.diagnosis.decode import LINE_PATTERNS, decode
from hotswap.diagnosis.headings import Headings
from hotswap.diagnosis.incidents import STEPS_SURVIVED
from hotswap.diagnosis.literals import minimal, required_literals
from hotswap.diagnosis.model import Evidence
from hotswap.diagnosis.prefixes import read_label
from hotswap.diagnosis.scan import Scanner
from hotswap.diagnosis.structured import read_structured
from hotswap.diagnosis.tracebacks import Tracebacks
from hotswap.errors import UsageError

WHOLE_BYTES_MAX = 256 << 10
"""Files up to this size are read line by line; of larger ones this much of the end is."""
JSON_BYTES_MAX = 64 << 20
"""Larger JSON documents are read as text."""
LINE_CHARS_MAX = 4096
EVIDENCE_MAX = 20_000
"""Different observations kept per source. The first ones are: a cause stands before its echoes."""
FILES_MAX = 100_000

_DOCUMENT = re.compile(rb"\s*\{\s*\"(?:apiVersion|items|kind|message|jobs|nodes|meta|metadata)\"")
_RANK_IN_PATH = re.compile(r"(?:^|[/_.-])(?:rank|global_rank|task|worker)[_-]?(\d+)(?=[/_.-]|$)", re.IGNORECASE)
_TORCHRUN_PATH = re.compile(r"/attempt_\d+/(\d+)/(?:stdout|stderr|error)\.")
_NODE_IN_PATH = re.compile(r"(?:^|[/_])((?:node|host|gpu|worker-node|ip)-?[\w-]*\d+)(?=[/_.]|$)", re.IGNORECASE)


def read_paths(paths: Iterable[str], *, book: RuleBook | None = None) -> Iterator[Evidence]:
    """Evidence from files and directories; ``-`` is standard input."""
    reader = Reader(book or default_book())
    for path in paths:
        if path == "-":
            yield from reader.read_stream(sys.stdin.buffer, source="standard input")
            continue
        for file in _files(Path(path)):
            yield from reader.read_file(file)


def read_text(text: str, *, source: str = "text", book: RuleBook | None = None) -> list[Evidence]:
    """Evidence from a text that is already in memory."""
    return list(Reader(book or default_book()).read_stream(io.BytesIO(text.encode()), source=source))


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise UsageError(f"there is no file or directory {str(path)!r}")
    found = 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            if not file.is_file():
                continue
            found += 1
            if found > FILES_MAX:
                raise UsageError(f"more than {FILES_MAX} files in {str(path)!r}; name the directory of one job")
            yield file


@lru_cache(maxsize=8)
def all_literals_of(book: RuleBook) -> frozenset[str]:
    """Literals of which each line that matters to *book* or to a decoder contains at least one: those of every expression, and
    names of exceptions, for when there have been too many of others."""
    found = (required_literals(pattern) for pattern in (*LINE_PATTERNS, *book.text_patterns()))
    names = (name for name in exceptions.NAMES if name.endswith("Error"))
    return frozenset(names).union(*found)


@lru_cache(maxsize=8)
def literals_of(book: RuleBook) -> frozenset[str]:
    """As few of them as find the same lines."""
    return minimal(all_literals_of(book))


class Reader:
    """Reads sources one after another; what it learnt about dull lines serves for the next one."""

    def __init__(self, book: RuleBook) -> None:
        """Takes from *book* what must not be skipped."""
        self._book = book

    @cached_property
    def scanner(self) -> Scanner:
        """Looks through large sources only: its index of literals takes longer to make than a small one to read."""
        return Scanner(all_literals_of(self._book))

    def read_file(self, path: Path) -> Iterator[Evidence]:
        """Evidence from one file, in its order."""
        rank, node = _place(str(path))
        try:
            year = time.gmtime(path.stat().st_mtime).tm_year
            with _open(path) as stream:
                yield from self.read_stream(stream, source=str(path), rank=rank, node=node, year=year)
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise UsageError(f"cannot read {str(path)!r}: {error}") from None

    def read_stream(
        self,
        stream: BinaryIO,
        *,
        source: str,
        rank: int | None = None,
        node: str | None = None,
        year: int | None = None,
    ) -> Iterator[Evidence]:
        """Evidence from a stream of log lines, or from a JSON document of a launcher or a scheduler."""
        year = year or time.gmtime().tm_year
        head = _read_up_to(stream, WHOLE_BYTES_MAX)
        if _DOCUMENT.match(head):
            head += _read_up_to(stream, JSON_BYTES_MAX - len(head)) if len(head) == WHOLE_BYTES_MAX else b""
            if len(head) < JSON_BYTES_MAX and (found := read_structured(head, source=source)) is not None:
                yield from (_placed(one, rank, node) for one in found)
                return
        if len(head) < WHOLE_BYTES_MAX:
            lines: Iterator[tuple[int, bytes]] = _all_lines(head, 0)
        else:
            lines = self._large(head, stream)
        yield from (_placed(one, rank, node) for one in _collapsed(self._evidence(lines, source, year)))

    def _large(self, head: bytes, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """The lines of interest, and at the end every line of the tail that was not among them."""
        tail = _Tail(head, stream)
        last = -1
        for offset, line in self.scanner.lines(cast(BinaryIO, tail)):
            last = max(last, offset)  # A sample of a flood comes after its block.
            yield offset, line
        start, content = tail.end()
        for offset, line in _all_lines(content, start):
            if offset > last:
                yield offset, line

    def _evidence(self, lines: Iterable[tuple[int, bytes]], source: str, year: int) -> Iterator[Evidence]:
        tracebacks, headings = Tracebacks(), Headings()
        for offset, raw in lines:
            text = raw[:LINE_CHARS_MAX].decode("utf-8", "replace")
            label = read_label(text, year=year)
            if not label.text:
                continue
            kind, facts = decode(label.text)
            kind = tracebacks.follow(label, kind, facts)
            node = headings.node(label.text, label.node)
            if kind == "exit" and facts.get("node"):
                node = str(facts["node"])
            if kind == "exit" and label.rank is None and facts.get("rank") is not None:
                label.rank = int(facts["rank"])
            if label.local_rank is not None:
                facts.setdefault("local_rank", label.local_rank)
            yield Evidence(
                kind=kind,
                source=source,
                node=node,
                rank=label.rank,
                gpu=str(facts.get("gpu") or "") or None,
                time=label.time,
                order=2 * offset + 2,
                text=label.text,
                facts=facts,
            )


class _Tail:
    """Passes a stream on and remembers its end."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream
        self._kept = b""
        self._passed = 0

    def read(self, size: int) -> bytes:
        block, self._head = (self._head, b"") if self._head else (self._stream.read(size), b"")
        self._passed += len(block)
        self._kept = (
            block[-WHOLE_BYTES_MAX:] if len(block) >= WHOLE_BYTES_MAX else (self._kept + block)[-WHOLE_BYTES_MAX:]
        )
        return block

    def end(self) -> tuple[int, bytes]:
        """(offset, content) of whole lines at the end."""
        start = self._passed - len(self._kept)
        cut = self._kept.find(b"\n") + 1
        return start + cut, self._kept[cut:]


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    """A pipe gives what it has; ask until there is enough or no more."""
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _all_lines(content: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    offset = start
    for line in content.splitlines(keepends=True):
        yield offset, line.rstrip(b"\r\n")
        offset += len(line)


_VARIES = re.compile(r"\[\d+,\d+,\d+\]|0x[0-9a-fA-F]+|\d{2}:\d{2}:\d{2}[.,\d]*")
_ASSERTION = re.compile(r"block: \[[\d,]+\].{0,30}thread: \[[\d,]+\]|\d+")


def _collapsed(evidence: Iterable[Evidence]) -> Iterator[Evidence]:
    """Equal observations become one with a count, at the place of the first. Text is compared without what always varies."""
    kept: dict[tuple[object, ...], Evidence] = {}
    counts: dict[tuple[object, ...], int] = {}
    restarts = steps = 0
    for one in evidence:
        restarts += one.kind == "restart"
        steps += one.kind == "progress"
        # What is said again after the training went on is said anew; see :mod:`hotswap.diagnosis.incidents`.
        key: tuple[object, ...] = (
            one.kind, one.node, one.rank, one.gpu, _shape(one), restarts, steps // STEPS_SURVIVED,
        )  # fmt: skip
        counts[key] = counts.get(key, 0) + 1
        if key not in kept and len(kept) < EVIDENCE_MAX:
            kept[key] = one
        elif key not in kept:
            counts.pop(key)
    for key, one in kept.items():
        yield replace(one, count=counts[key]) if counts[key] > 1 else one


def _shape(one: Evidence) -> str:
    if one.kind in ("line", "exception", "complaint"):
        pattern = _ASSERTION if "ssertion" in one.text else _VARIES
        return pattern.sub("", one.text)
    if one.kind in ("progress", "pulse"):
        return one.text
    return repr(sorted(one.facts.items()))


def _place(path: str) -> tuple[int | None, str | None]:
    """Rank and node as a path names them."""
    torchrun = _TORCHRUN_PATH.search(path)
    rank = _RANK_IN_PATH.search(path)
    node = _NODE_IN_PATH.search(path)
    return (int(rank[1]) if rank else int(torchrun[1]) if torchrun else None), (node[1] if node else None)


def _placed(one: Evidence, rank: int | None, node: str | None) -> Evidence:
    if (rank is None or one.rank is not None) and (node is None or one.node is not None):
        return one
    return replace(one, rank=one.rank if one.rank is not None else rank, node=one.node or node)


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb", buffering=0)
