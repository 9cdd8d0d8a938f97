from __future__ import annotations

import math
import struct
import tracemalloc
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.errors import IntegrityError, UnsupportedState
from hotswap.replication.plaintree import DEPTH_MAX, decode, encode


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, torch.Tensor):
        forms = (left.dtype, left.shape) == (right.dtype, right.shape)
        return forms and raw(left) == raw(right)
    if isinstance(left, numpy.ndarray | numpy.generic):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
text = st.text(st.characters(codec=None, exclude_categories=()))
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda dtype, shape: torch.testing.make_tensor(shape, dtype=dtype, device="cpu"), dtypes, shapes)
arrays = st.builds(
    lambda dtype, shape: numpy.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["f4", "f8", "f2", "i1", "u8", "?", "c16", ">i4", "U3", "S2", "M8[s]"]),
    shapes,
)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    text,
    st.binary(),
    dtypes,
    st.sampled_from([torch.device("cuda:3")]),
)
keys = st.recursive(hashable, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
leaves = st.one_of(
    hashable,
    st.builds(complex, floats, floats),
    tensors,
    arrays,
    shapes.map(torch.Size),
    st.sampled_from([numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    back = decode(encode(tree))
    if isinstance(tree, numpy.ndarray) and tree.dtype.byteorder == ">":
        tree = tree.astype(tree.dtype.newbyteorder("<"))
    assert encode(back) == encode(tree)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        -0.0,
        struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0],
        float("-inf"),
        complex(float("nan"), -0.0),
        2**200,
        -(2**63),
        "\ud800 lone",
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        numpy.datetime64("2020-01-01"),
        {(1, ("a", None)): {1, 2}, torch.float32: torch.device("cpu"), 1.5: True},
        [True, 1, 1.0],
    ],
    ids=repr,
)
def test_bits_and_types_are_kept(value: Any) -> None:
    assert same(decode(encode(value)), value)


class Colour(IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"x": [0, 1, 2, object()]}, r"loader\['x'\]\[3\] is a object"),
        ({"x": {"y": Colour.RED}}, r"loader\['x'\]\['y'\] is a Colour"),
        ((Text("a"),), r"loader\[0\] is a Text"),
        ({Text("a"): 1}, r"loader key 'a' is a Text"),
        ({frozenset([Colour.RED])}, "member <Colour.RED: 1> is a Colour"),
        (defaultdict(list), "is a defaultdict"),
        (lambda: None, "is a function"),
        (torch.nn.Parameter(torch.zeros(1)), "is a Parameter"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (numpy.array([object()]), "numpy object"),
        (numpy.zeros(2, dtype=[("a", "i4")]), "numpy"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        encode(value, name="loader")


def test_depth_is_bounded_both_ways() -> None:
    tree: Any = 1
    for _ in range(DEPTH_MAX + 1):
        tree = [tree]
    with pytest.raises(UnsupportedState, match="nested deeper"):
        encode(tree)
    with pytest.raises(IntegrityError, match="nested deeper"):
        decode(b"l\x01\x00\x00\x00" * 10_000 + b"N")


def test_sets_have_one_form() -> None:
    assert encode({"a", "b", "c", 1}) == encode({1, "c", "b", "a"})


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused_or_is_a_tree(data: bytes) -> None:
    try:
        tree = decode(data)
    except IntegrityError:
        return
    encode(tree)


@settings(max_examples=300, deadline=None)
@given(trees, st.data())
def test_a_damaged_tree_is_refused_or_is_a_tree(tree: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(tree))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut])):
        try:
            encode(decode(candidate))
        except IntegrityError:
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"NN",
        b"s\xff\xff\xff\xff",
        b"l\xff\xff\xff\xff",
        b"d\xff\xff\xff\x7fNN",
        b"s\x01\x00\x00\x00\xff",
        b"d\x01\x00\x00\x00l\x00\x00\x00\x00N",
        b"S\x01\x00\x00\x00l\x00\x00\x00\x00",
        b"y\x04\x00\x00\x00load",
        b"y\x06\x00\x00\x00tensor",
        b"e\x05\x00\x00\x00a\x00b\x00c",
        b"x\x07\x00\x00\x00float32\x01\x00\x00\x00" + b"\xff" * 8 + b"\x00" * 4,
        b"x\x07\x00\x00\x00float32\x02\x00\x00\x00" + b"\x00" * 8 + b"\xff" * 8 + b"\x00" * 4,
        b"n\x03\x00\x00\x00|O8\x00\x00\x00\x00\x08\x00\x00\x00" + b"\x00" * 8,
        b"n\x03\x00\x00\x00|V8\x00\x00\x00\x00\x08\x00\x00\x00" + b"\x00" * 8,
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(data)


def test_a_lie_about_length_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        for data in (b"l\xff\xff\xff\xff" + b"N" * 1000, b"b\xff\xff\xff\xff", b"t\xff\xff\xff\x7f"):
            with pytest.raises(IntegrityError):
                decode(data)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
