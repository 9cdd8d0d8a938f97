"""What snapshots and checkpoints say about themselves is believed only where it makes sense."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hotswap.errors import IntegrityError
from hotswap.integrations.discovery import discover
from hotswap.replication import durable_index, layout, plaintree
from hotswap.replication.capture import Capture
from hotswap.replication.durable_index import SlotRecord

ALLOCATED_MAX = 8 << 20
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.binary(max_size=20),
        st.text(max_size=20),
        st.sampled_from([torch.float32, torch.bool]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.tuples(inner, inner)),
    max_leaves=6,
)


@contextmanager
def modest() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ALLOCATED_MAX, f"{peak} bytes"


@pytest.fixture(scope="module")
def snapshot() -> tuple[bytes, int]:
    """A real unique section, and the length of the shared one."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    capture = Capture(discover(model, optimizer))
    memory = bytearray(capture.nbytes())
    shared, unique = capture.write(memoryview(memory), slot=0, generation=1, step=1)
    return bytes(memory[shared : shared + unique]), shared


def read(section: bytes, shared: int) -> None:
    """Everything that is done before tensors are touched."""
    with suppress(IntegrityError):
        header, capacity = layout.read_header(memoryview(section), shared)
        buffer = torch.zeros(shared + len(section), dtype=torch.uint8)
        layout.views(buffer, header.rows, unique_start=shared, header_capacity=capacity)


def forged(section: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The section with another header."""
    length = int.from_bytes(section[:8], "little")
    fields = plaintree.decode(section[8 : 8 + length])
    change(fields)
    header = plaintree.encode(fields)
    return len(header).to_bytes(8, "little") + header + section[8 + length :]


def signed(table: object) -> Callable[[dict[str, Any]], None]:
    """With another table, whose hash is right."""
    import hashlib

    encoded = plaintree.encode(table)

    def change(fields: dict[str, Any]) -> None:
        fields["table"], fields["layout"] = encoded, hashlib.sha256(encoded).hexdigest()

    return change


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(snapshot: tuple[bytes, int], data: st.DataObject) -> None:
    section, shared = snapshot
    damaged = bytearray(section)
    length = int.from_bytes(section[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 8 + length))] ^= data.draw(st.integers(1, 255))
    read(
        bytes(damaged[: data.draw(st.integers(0, len(section)))]) if data.draw(st.booleans()) else bytes(damaged),
        shared,
    )


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(["format", "slot", "generation", "step", "capacity", "table", "objects"]), value=PLAIN)
def test_a_header_with_any_field_is_refused_or_harmless(snapshot: tuple[bytes, int], name: str, value: object) -> None:
    section, shared = snapshot
    read(forged(section, lambda fields: fields.update({name: value})), shared)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(index=st.integers(0, 8), value=PLAIN)
def test_a_table_with_any_entry_is_refused_or_harmless(snapshot: tuple[bytes, int], index: int, value: object) -> None:
    section, shared = snapshot
    rows = plaintree.decode(plaintree.decode(section[8 : 8 + int.from_bytes(section[:8], "little")])["table"])
    rows[0] = [value if place == index else entry for place, entry in enumerate(rows[0])]
    read(forged(section, signed(rows)), shared)


@pytest.mark.parametrize(
    "shape",
    [["x" * 1000, 10**6], [b"x" * 1000, 10**6], [[0] * 1000, 10**6], [2**62, 2**62], [-1, -1], [0, 10**30]],
    ids=["text", "bytes", "list", "huge", "negative", "beyond"],
)
def test_a_shape_cannot_make_anything_large(snapshot: tuple[bytes, int], shape: list[Any]) -> None:
    section, shared = snapshot
    rows = plaintree.decode(plaintree.decode(section[8 : 8 + int.from_bytes(section[:8], "little")])["table"])
    for nbytes in (rows[0][8], 0):
        rows[0] = [*rows[0][:2], shape, *rows[0][3:8], nbytes]
        with modest():
            read(forged(section, signed(rows)), shared)


# --- durable checkpoints ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.one_of(JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=100)))
def test_a_slots_record_is_one_or_refused(text: bytes) -> None:
    with suppress(IntegrityError):
        SlotRecord.from_json(text, Path("slot.json"))


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(["format", "slot", "step", "generation", "files", "shared_nbytes"]), value=JSON)
def test_a_record_with_any_field_is_one_or_refused(name: str, value: Any) -> None:
    record = SlotRecord(
        slot=0, step=1, generation=1, shared_nbytes=0, unique_nbytes=1, header_nbytes=1, files={"a": (1, "b")}
    )
    fields = json.loads(record.to_json())
    fields[name] = value
    with suppress(IntegrityError):
        SlotRecord.from_json(json.dumps(fields).encode(), Path("slot.json"))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        JSON.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.text(max_size=6), JSON, max_size=3).map(
            lambda slots: json.dumps({"format": 1, "step": 1, "slots": slots}).encode()
        ),
        st.binary(max_size=100),
    ),
    slot=st.one_of(st.none(), JSON),
)
def test_a_manifest_counts_or_not(tmp_path: Path, text: bytes, slot: Any) -> None:
    folder = durable_index.slot_directory(tmp_path, 1, 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slot.json").write_text(json.dumps(slot))
    (folder.parent / "manifest.json").write_bytes(text)
    assert durable_index.latest(tmp_path) in (None, 1)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 100_000, b'{"format": 1, "step": 1e999}'])
def test_a_bomb_in_a_manifest_is_refused_at_once(tmp_path: Path, text: bytes) -> None:
    folder = durable_index.step_directory(tmp_path, 1)
    folder.mkdir()
    (folder / "manifest.json").write_bytes(text)
    began = time.monotonic()
    assert durable_index.latest(tmp_path) is None
    with pytest.raises(IntegrityError):
        SlotRecord.from_json(text, Path("slot.json"))
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("name", ["a" * 5000, "\0", "../" * 2000])
def test_a_file_name_that_cannot_be_makes_no_checkpoint(tmp_path: Path, name: str) -> None:
    folder = durable_index.slot_directory(tmp_path, 1, 0)
    folder.mkdir(parents=True)
    record = SlotRecord(
        slot=0, step=1, generation=1, shared_nbytes=0, unique_nbytes=1, header_nbytes=1, files={name: (1, "b")}
    )
    (folder / "slot.json").write_bytes(record.to_json())
    with pytest.raises(IntegrityError):
        durable_index.commit(tmp_path, 1, {0: 1})


def test_storage_that_cannot_be_read_shows_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent asks while it recovers: a file system that fails must not end it."""

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    durable_index.step_directory(tmp_path, 1).mkdir()
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert durable_index.latest(tmp_path) is None
    monkeypatch.setattr(Path, "iterdir", fail)
    assert durable_index.latest(tmp_path) is None
