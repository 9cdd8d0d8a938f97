"""Where each tensor of a snapshot lies, and what the head of the unique section says.

    shared section   tensors that peers hold as well
    unique section   8 bytes: length of the header
                     header: table of all tensors, identity of the snapshot, objects
                     room for the header to grow
                     tensors that nobody else has

All tensors start at a multiple of 64 bytes. Offsets in the table count from the start of their section.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from hotswap.errors import IntegrityError
from hotswap.integrations.base import Place, TensorEntry, TensorSpec
from hotswap.replication import plaintree

ALIGNMENT_NBYTES = 64
_LENGTH = struct.Struct("<Q")
_FORMAT = 2
_NUMBER_MAX = 2**63 - 1
_HEADER_SPARE_NBYTES = 4096
"""The header grows a little from step to step (numbers get longer); offsets must not move because of that."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Place and form of one tensor."""

    name: str
    spec: TensorSpec
    shared: bool
    volatile: bool
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Places of all tensors of a snapshot."""

    rows: tuple[Row, ...]
    shared_nbytes: int
    unique_nbytes: int
    header_capacity: int
    encoded: bytes
    """The table as it is written."""

    @property
    def nbytes(self) -> int:
        """Length of the whole snapshot."""
        return self.shared_nbytes + self.unique_nbytes

    @cached_property
    def digest(self) -> str:
        """Hash of the table."""
        return hashlib.sha256(self.encoded).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a snapshot says about itself."""

    slot: int
    generation: int
    step: int
    rows: tuple[Row, ...]
    objects: Any


def aligned(nbytes: int) -> int:
    """Round up to the alignment."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


@dataclass(frozen=True, kw_only=True)
class Form:
    """A tensor that is to have a place in a snapshot."""

    name: str
    spec: TensorSpec
    shared: bool
    volatile: bool


def lay_out(entries: Sequence[TensorEntry], objects_nbytes: int) -> Layout:
    """Give each tensor its place; ``objects_nbytes`` is the length of the encoded objects at this time."""
    forms = [Form(name=e.name, spec=e.spec(), shared=e.shared, volatile=e.volatile) for e in entries]
    return lay_out_forms(forms, objects_nbytes)


def lay_out_forms(forms: Sequence[Form], objects_nbytes: int) -> Layout:
    """The same for tensors that need not exist."""
    ends = {True: 0, False: 0}
    rows: list[Row] = []
    for form in forms:
        nbytes = prod(form.spec.shape) * form.spec.dtype.itemsize
        rows.append(
            Row(
                name=form.name,
                spec=form.spec,
                shared=form.shared,
                volatile=form.volatile,
                offset=ends[form.shared],
                nbytes=nbytes,
            )
        )
        ends[form.shared] += aligned(nbytes)
    # The table tells offsets from the end of the header room, so that its own length does not enter it.
    encoded = plaintree.encode([_packed(row) for row in rows])
    capacity = aligned(_LENGTH.size + len(encoded) + objects_nbytes + objects_nbytes // 4 + _HEADER_SPARE_NBYTES)
    return Layout(
        rows=tuple(rows),
        shared_nbytes=ends[True],
        unique_nbytes=capacity + ends[False],
        header_capacity=capacity,
        encoded=encoded,
    )


def header_nbytes(layout: Layout, objects: bytes) -> int:
    """Upper bound of the header with these objects."""
    return _LENGTH.size + len(layout.encoded) + len(objects) + 512


def write_header(view: memoryview, layout: Layout, objects: bytes, *, slot: int, generation: int, step: int) -> None:
    """Write the head of the unique section ``view``."""
    fields = {
        "format": _FORMAT,
        "slot": slot,
        "generation": generation,
        "step": step,
        "layout": layout.digest,
        "capacity": layout.header_capacity,
        "table": layout.encoded,
        "objects": objects,
    }
    header = plaintree.encode(fields)
    end = _LENGTH.size + len(header)
    assert end <= layout.header_capacity, f"header of {end} bytes, room for {layout.header_capacity}"
    view[: _LENGTH.size] = _LENGTH.pack(len(header))
    view[_LENGTH.size : end] = header


def read_header(view: memoryview, shared_nbytes: int, known: Layout | None = None) -> tuple[Header, int]:
    """Return the header of the unique section ``view`` and the room it has. IntegrityError if it makes no sense.

    If the snapshot has the layout ``known``, its rows are those of ``known``: a table of thousands is not read again.
    """
    if len(view) < _LENGTH.size:
        raise IntegrityError(f"a unique section of {len(view)} bytes has no header: the snapshot is incomplete")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    if length > len(view) - _LENGTH.size:
        raise IntegrityError(f"a header of {length} bytes in a unique section of {len(view)}: the snapshot is damaged")
    fields = plaintree.decode(view[_LENGTH.size : _LENGTH.size + length])
    try:
        return _parsed(fields, view, shared_nbytes, known)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as err:
        raise IntegrityError(f"the snapshot's header lacks or mistypes a field: {err!r}") from err


def _parsed(fields: dict[str, Any], view: memoryview, shared_nbytes: int, known: Layout | None) -> tuple[Header, int]:
    if fields["format"] != _FORMAT:
        raise IntegrityError(f"the snapshot has format {fields['format']}, this version of hotswap reads {_FORMAT}")
    if hashlib.sha256(fields["table"]).hexdigest() != fields["layout"]:
        raise IntegrityError("the snapshot's table does not match its hash: the snapshot is damaged")
    capacity = fields["capacity"]
    if type(capacity) is not int or not 0 <= capacity <= len(view) or capacity % ALIGNMENT_NBYTES:
        raise IntegrityError(f"a header's room of {str(capacity)[:80]} bytes makes no sense: the snapshot is damaged")
    if known is not None and (known.encoded, known.header_capacity) == (fields["table"], capacity):
        rows = known.rows
        if (known.shared_nbytes, known.unique_nbytes) != (shared_nbytes, len(view)):
            raise IntegrityError(f"sections of {shared_nbytes} and {len(view)} bytes do not have the snapshot's layout")
    else:
        rows = _rows(fields["table"], {True: shared_nbytes, False: len(view) - capacity})
    header = Header(
        slot=int(fields["slot"]),
        generation=int(fields["generation"]),
        step=int(fields["step"]),
        rows=rows,
        objects=plaintree.decode(fields["objects"]),
    )
    return header, capacity


def _rows(encoded: bytes, room: dict[bool, int]) -> tuple[Row, ...]:
    rows = tuple(_unpacked(row) for row in plaintree.decode(encoded))
    for row in rows:
        if row.offset % ALIGNMENT_NBYTES or row.offset + row.nbytes > room[row.shared]:
            raise IntegrityError(f"{row.name} lies outside of its section: the snapshot is damaged or incomplete")
    return rows


def views(buffer: torch.Tensor, rows: Sequence[Row], *, unique_start: int, header_capacity: int) -> list[torch.Tensor]:
    """Each row's place in ``buffer`` (bytes), as a tensor of the row's form."""
    found = []
    for row in rows:
        start = row.offset if row.shared else unique_start + header_capacity + row.offset
        flat = buffer[start : start + row.nbytes]
        found.append(flat.view(row.spec.dtype).view(row.spec.shape))
    return found


def _packed(row: Row) -> list[Any]:
    spec = row.spec
    place = None if spec.place is None else [list(spec.place.whole), list(spec.place.offset)]
    form = [spec.dtype, list(spec.shape), spec.device_type, spec.is_dtensor, place]
    return [row.name, *form, row.shared, row.volatile, row.offset, row.nbytes]


def _unpacked(packed: list[Any]) -> Row:
    name, dtype, shape, device_type, is_dtensor, place, shared, volatile, offset, nbytes = packed
    whole, begin = place if place is not None else (shape, [0] * len(shape))
    # Before anything is computed with them: a text times a number is a long text.
    if not all(
        type(number) is int and 0 <= number <= _NUMBER_MAX for number in (offset, nbytes, *shape, *whole, *begin)
    ):
        raise IntegrityError(f"the place or shape of {str(name)[:80]} makes no sense: the snapshot is damaged")
    if [type(value) for value in (name, device_type, is_dtensor, shared, volatile)] != [str, str, bool, bool, bool]:
        raise IntegrityError(f"the entry of {str(name)[:80]} is mistyped: the snapshot is damaged")
    if not len(whole) == len(begin) == len(shape) or any(
        b + s > w for w, b, s in zip(whole, begin, shape, strict=True)
    ):
        raise IntegrityError(f"{name} claims to be {shape} at {begin} of {whole}: the snapshot is damaged")
    spec = TensorSpec(
        dtype=dtype,
        shape=tuple(shape),
        device_type=device_type,
        is_dtensor=is_dtensor,
        place=None if place is None else Place(whole=tuple(whole), offset=tuple(begin)),
    )
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if expected != nbytes:
        raise IntegrityError(f"{name} claims {nbytes} bytes for {shape} {dtype}: the snapshot is damaged")
    return Row(name=name, spec=spec, shared=shared, volatile=volatile, offset=offset, nbytes=nbytes)
