"""Text that is on every machine: the sources of Python's standard library, as bytes (a vocabulary of 256 tokens).

A file belongs to the held-out split by the hash of its name, so the split is the same wherever the library is.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

VOCABULARY = 256
HELD_OUT_ONE_IN = 12
TRAIN_BYTES_MAX = 1 << 20
HELD_OUT_BYTES_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Both splits, one byte a token."""

    train: bytes
    held_out: bytes

    def fingerprint(self) -> str:
        """Equal fingerprints: equal text, so losses can be compared."""
        return hashlib.sha256(self.train + b"\0" + self.held_out).hexdigest()[:16]


@lru_cache(maxsize=1)
def load() -> Corpus:
    """Read the corpus, once per process; about 1 MB in a few milliseconds."""
    train, held_out = bytearray(), bytearray()
    for path, name in _sources(Path(sysconfig.get_path("stdlib"))):
        split, limit = (held_out, HELD_OUT_BYTES_MAX) if is_held_out(name) else (train, TRAIN_BYTES_MAX)
        if len(split) < limit:
            split += path.read_bytes()
        if len(train) >= TRAIN_BYTES_MAX and len(held_out) >= HELD_OUT_BYTES_MAX:
            break
    return Corpus(train=bytes(train[:TRAIN_BYTES_MAX]), held_out=bytes(held_out[:HELD_OUT_BYTES_MAX]))


def is_held_out(name: str) -> bool:
    """Whether the file with this name (relative to the library, with slashes) is kept for evaluation."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _sources(library: Path) -> Iterator[tuple[Path, str]]:
    """The library's own modules in the order of their names; installed packages and the test suite are not among them."""
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        name = path.relative_to(library).as_posix()
        if name.split("/")[0] not in ("site-packages", "dist-packages", "test"):
            yield path, name
