"""What a slot's folder of a durable checkpoint says to jobs of another size: where its tensors lie in the whole, and which state is its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from hotswap.errors import IntegrityError
from hotswap.replication import plaintree
from hotswap.replication.layout import Header

FILE = "places.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box in a whole tensor: the shape of the whole, first index and size in each dimension."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def overlap(self, other: Part) -> tuple[tuple[int, int], ...] | None:
        """First and last index, not included, of what two parts have in common in each dimension; None if that is nothing."""
        found = []
        for begin, size, others_begin, others_size in zip(
            self.offset, self.size, other.offset, other.size, strict=True
        ):
            first, last = max(begin, others_begin), min(begin + size, others_begin + others_size)
            if first >= last:
                return None
            found.append((first, last))
        return tuple(found)

    def within(self, box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
        """Where *box*, in indices of the whole, lies in this part."""
        return tuple(slice(first - begin, last - begin) for (first, last), begin in zip(box, self.offset, strict=True))


@dataclass(frozen=True, kw_only=True)
class Places:
    """``tensors``: those of which the slot has a part only. ``objects``: SHA-256 of the plain values of each part of the state."""

    tensors: dict[str, Part]
    objects: dict[str, str]

    def to_json(self) -> bytes:
        """As it is stored."""
        tensors = {name: [part.whole, part.offset, part.size] for name, part in self.tensors.items()}
        return json.dumps({"format": _FORMAT, "tensors": tensors, "objects": self.objects}, sort_keys=True).encode()


def of(header: Header) -> Places:
    """Of a snapshot's header."""
    return Places(
        tensors={
            row.name: Part(whole=row.spec.place.whole, offset=row.spec.place.offset, size=row.spec.shape)
            for row in header.rows
            if row.spec.place is not None
        },
        objects={name: hashlib.sha256(plaintree.encode(tree)).hexdigest() for name, tree in header.objects.items()},
    )


def read(path: Path, digest: str) -> Places:
    """Read a slot's file; *digest* is its SHA-256. IntegrityError if it is another one."""
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise IntegrityError(f"{path} fails its checksum: this checkpoint cannot be used")
    fields = json.loads(text)
    if fields["format"] != _FORMAT:
        raise IntegrityError(f"{path} has another format than {_FORMAT}: written by another version of hotswap")
    tensors = {
        name: Part(whole=tuple(whole), offset=tuple(offset), size=tuple(size))
        for name, (whole, offset, size) in fields["tensors"].items()
    }
    return Places(tensors=tensors, objects=fields["objects"])
