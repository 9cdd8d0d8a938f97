"""Plain Python values as bytes and back, without pickle: what travels cannot run.

Allowed: None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set, frozenset, torch.dtype,
torch.device, torch.Size, torch tensors (stored as CPU tensors) and numpy scalars and arrays of plain dtypes.
Everything round-trips bit for bit, NaN payloads included. The type must match exactly: a subclass may carry
behaviour or fields that would be lost, so it is refused by name.

One value = one tag byte and its payload; lengths are unsigned 32-bit, little endian. A container cannot claim more
items, nor an array more bytes, than the input has left, so decoding never allocates beyond a small multiple of it.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from hotswap.errors import IntegrityError, UnsupportedState

DEPTH_MAX = 64
_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_RANK_MAX = 64
_NUMPY_DTYPE = re.compile(r"[<|](b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6}|[mM]8(\[[a-zA-Z]{1,4}\])?)")
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,4})?")


def encode(value: object, *, name: str = "state") -> bytes:
    """Return ``value`` as bytes; ``name`` starts the path in the error.

    Raises UnsupportedState, with the path of the culprit, for a value outside the list above.
    """
    out = bytearray()
    _put(out, value, name, 0)
    return bytes(out)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that `encode` wrote. Raises IntegrityError for anything else."""
    reader = _Reader(memoryview(data).cast("B") if not isinstance(data, memoryview) else data)
    try:
        value = reader.value(0)
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as err:
        raise IntegrityError(f"malformed state tree: {err}; the bytes were damaged or are not a state tree") from err
    if reader.offset != len(reader.data):
        raise IntegrityError(f"malformed state tree: {len(reader.data) - reader.offset} bytes follow its end")
    return value


def _put(out: bytearray, value: Any, path: str, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise UnsupportedState(f"{path} is nested deeper than {DEPTH_MAX} levels: flatten what state_dict() returns")
    writer = _WRITERS.get(type(value))
    if writer is not None:
        writer(out, value, path, depth)
    elif not _put_numpy(out, value, path):
        raise UnsupportedState(f"{path} is a {type(value).__qualname__}: return plain values from state_dict()")


def _put_blob(out: bytearray, tag: bytes, payload: bytes | memoryview, path: str) -> None:
    if len(payload) >= 2**32:
        raise UnsupportedState(f"{path} has {len(payload)} bytes, more than 4 GiB: register it as a tensor of a module")
    out += tag
    out += _U32.pack(len(payload))
    out += payload


def _put_int(out: bytearray, value: int, path: str, depth: int) -> None:
    _put_blob(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), path)


def _put_sequence(tag: bytes) -> Callable[[bytearray, Any, str, int], None]:
    def put(out: bytearray, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> None:
        out += tag
        out += _U32.pack(len(value))
        for index, item in enumerate(value):
            _put(out, item, f"{path}[{index}]", depth + 1)

    return put


def _put_mapping(tag: bytes) -> Callable[[bytearray, Any, str, int], None]:
    def put(out: bytearray, value: dict[Any, Any], path: str, depth: int) -> None:
        out += tag
        out += _U32.pack(len(value))
        for key, item in value.items():
            _put(out, key, f"{path} key {key!r}", depth + 1)
            _put(out, item, f"{path}[{key!r}]", depth + 1)

    return put


def _put_set(tag: bytes) -> Callable[[bytearray, Any, str, int], None]:
    def put(out: bytearray, value: set[Any] | frozenset[Any], path: str, depth: int) -> None:
        items = []
        for item in value:
            encoded = bytearray()
            _put(encoded, item, f"{path} member {item!r}", depth + 1)
            items.append(bytes(encoded))
        out += tag
        out += _U32.pack(len(items))
        # Sorted, because a set's order depends on the process's hash seed and equal states must give equal bytes.
        out += b"".join(sorted(items))

    return put


def _put_shape(out: bytearray, shape: tuple[int, ...]) -> None:
    out += _U32.pack(len(shape))
    for size in shape:
        out += size.to_bytes(8, "little")


def _put_tensor(out: bytearray, value: torch.Tensor, path: str, depth: int) -> None:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise UnsupportedState(f"{path} is a {value.layout} tensor on {value.device}: make it an ordinary dense tensor")
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
    _put_blob(out, b"x", str(value.dtype).removeprefix("torch.").encode(), path)
    _put_shape(out, tuple(value.shape))
    _put_blob(out, b"", memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else b"", path)


def _put_numpy(out: bytearray, value: Any, path: str) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    little = value.dtype.newbyteorder("<")
    if not _NUMPY_DTYPE.fullmatch(little.str):
        raise UnsupportedState(f"{path} is a numpy {value.dtype}: only plain numeric and text dtypes travel")
    is_array = type(value) is numpy.ndarray
    array = numpy.ascontiguousarray(value, dtype=little)
    _put_blob(out, b"n" if is_array else b"v", little.str.encode(), path)
    _put_shape(out, value.shape)
    _put_blob(out, b"", array.tobytes(), path)
    return True


_WRITERS: dict[type, Callable[[bytearray, Any, str, int], None]] = {
    type(None): lambda out, value, path, depth: out.extend(b"N"),
    bool: lambda out, value, path, depth: out.extend(b"T" if value else b"F"),
    int: _put_int,
    float: lambda out, value, path, depth: out.extend(b"f" + _F64.pack(value)),
    complex: lambda out, value, path, depth: out.extend(b"c" + _C128.pack(value.real, value.imag)),
    str: lambda out, value, path, depth: _put_blob(out, b"s", value.encode("utf-8", "surrogatepass"), path),
    bytes: lambda out, value, path, depth: _put_blob(out, b"b", value, path),
    list: _put_sequence(b"l"),
    tuple: _put_sequence(b"t"),
    torch.Size: _put_sequence(b"z"),
    dict: _put_mapping(b"d"),
    OrderedDict: _put_mapping(b"o"),
    set: _put_set(b"S"),
    frozenset: _put_set(b"Z"),
    torch.dtype: lambda out, value, path, depth: _put_blob(out, b"y", str(value).removeprefix("torch.").encode(), path),
    torch.device: lambda out, value, path, depth: _put_blob(out, b"e", str(value).encode(), path),
    torch.Tensor: _put_tensor,
}


class _Reader:
    """A cursor over untrusted bytes; every read is checked against what is left."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0
        self._readers: dict[bytes, Callable[[int], Any]] = {
            b"N": lambda depth: None,
            b"T": lambda depth: True,
            b"F": lambda depth: False,
            b"i": lambda depth: int.from_bytes(self._blob(), "little", signed=True),
            b"f": lambda depth: _F64.unpack(self._take(8))[0],
            b"c": lambda depth: complex(*_C128.unpack(self._take(16))),
            b"s": lambda depth: self._text("surrogatepass"),
            b"b": lambda depth: bytes(self._blob()),
            b"l": self._items,
            b"t": lambda depth: tuple(self._items(depth)),
            b"z": lambda depth: torch.Size(self._items(depth)),
            b"d": lambda depth: dict(self._pairs(depth)),
            b"o": lambda depth: OrderedDict(self._pairs(depth)),
            b"S": lambda depth: set(self._items(depth)),
            b"Z": lambda depth: frozenset(self._items(depth)),
            b"y": lambda depth: self._dtype(),
            b"e": lambda depth: self._device(),
            b"x": lambda depth: self._tensor(),
            b"n": lambda depth: self._array(),
            b"v": lambda depth: self._scalar(),
        }

    def value(self, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise IntegrityError(f"malformed state tree: nested deeper than {DEPTH_MAX} levels")
        tag = bytes(self._take(1))
        reader = self._readers.get(tag)
        if reader is None:
            raise IntegrityError(f"malformed state tree: unknown tag {tag!r} at byte {self.offset - 1}")
        return reader(depth + 1)

    def _take(self, count: int) -> memoryview:
        if count > len(self.data) - self.offset:
            raise IntegrityError(
                f"malformed state tree: {count} bytes wanted at byte {self.offset} of {len(self.data)}"
            )
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _count(self, bytes_each: int) -> int:
        count = self._u32()
        if count * bytes_each > len(self.data) - self.offset:
            raise IntegrityError(f"malformed state tree: {count} items claimed, too few bytes left for them")
        return count

    def _blob(self) -> memoryview:
        return self._take(self._u32())

    def _text(self, errors: str = "strict") -> str:
        return str(self._blob(), "utf-8", errors)

    def _items(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self._count(1))]

    def _pairs(self, depth: int) -> list[tuple[Any, Any]]:
        return [(self.value(depth), self.value(depth)) for _ in range(self._count(2))]

    def _dtype(self) -> torch.dtype:
        return dtype_named(self._text())

    def _device(self) -> torch.device:
        text = self._text()
        if not _DEVICE.fullmatch(text):
            raise IntegrityError(f"malformed state tree: {text[:40]!r} is no device")
        return torch.device(text)

    def _shape(self) -> tuple[int, ...]:
        rank = self._count(8)
        if rank > _RANK_MAX:
            raise IntegrityError(f"malformed state tree: an array of rank {rank}")
        return tuple(int.from_bytes(self._take(8), "little") for _ in range(rank))

    def _tensor(self) -> torch.Tensor:
        dtype, shape, raw = self._dtype(), self._shape(), self._blob()
        if prod(shape) * dtype.itemsize != len(raw):
            raise IntegrityError(f"malformed state tree: {len(raw)} bytes for a tensor of {shape} {dtype}")
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)

    def _array(self) -> Any:
        import numpy

        text, shape, raw = self._text(), self._shape(), self._blob()
        if not _NUMPY_DTYPE.fullmatch(text):
            raise IntegrityError(f"malformed state tree: {text[:40]!r} is no plain numpy dtype")
        dtype = numpy.dtype(text)
        if prod(shape) * dtype.itemsize != len(raw):
            raise IntegrityError(f"malformed state tree: {len(raw)} bytes for an array of {shape} {dtype}")
        if not raw:
            return numpy.empty(shape, dtype=dtype)
        return numpy.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)

    def _scalar(self) -> Any:
        array = self._array()
        if array.shape != ():
            raise IntegrityError(f"malformed state tree: a numpy scalar of shape {array.shape}")
        return array[()]


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype called ``name`` (``float32``). Raises IntegrityError if there is none."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"malformed state tree: {name[:40]!r} is no dtype of torch {torch.__version__}")
    return dtype
