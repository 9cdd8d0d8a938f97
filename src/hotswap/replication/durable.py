"""Durable checkpoints in torch's distributed-checkpoint format, made from snapshots in host memory.

`write` runs in a process of its own, forked for it: it maps the snapshot's memory file and needs no process group, so
training goes on meanwhile. One slot is one DCP folder, which ``torch.distributed.checkpoint`` can read without hotswap;
the snapshot's header travels as one more tensor, so that hotswap restores everything else exactly.
"""

from __future__ import annotations

import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from hotswap.errors import IntegrityError
from hotswap.replication import places
from hotswap.replication.durable_index import (
    SLOT_FILE,
    TEMPORARY_PREFIX,
    SlotRecord,
    file_digest,
    is_there,
    manifest,
    slot_directory,
    sync_directory,
    write_file,
)
from hotswap.replication.layout import Header, read_header, views

PLACES_FILE = places.FILE
HEADER_KEY = "hotswap/header"


def write(fd: int, nbytes: int, shared_nbytes: int, unique_nbytes: int, path: str | os.PathLike[str]) -> None:
    """Write the snapshot in memory file ``fd`` (``nbytes`` long) as the DCP folder ``path``, unless it is there already.

    What is there is replaced only if it is of another generation: a manifest may name it by now, and no two folders of the same state
    are the same bytes.
    OSError, with what to do, if the disk is full or read-only; no other checkpoint is touched then.
    """
    path = Path(path)
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)[: shared_nbytes + unique_nbytes]
    header, capacity = read_header(raw[shared_nbytes:].numpy().data, shared_nbytes)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}")
    identity = header.step, header.slot, header.generation
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_there(path, *identity):
            return
        _remove_leftovers(path)
        _save(_state(raw, header, shared_nbytes, capacity), temporary)
        write_file(temporary / PLACES_FILE, places.of(header).to_json())
        record = SlotRecord(
            slot=header.slot,
            step=header.step,
            generation=header.generation,
            shared_nbytes=shared_nbytes,
            unique_nbytes=unique_nbytes,
            header_nbytes=capacity,
            files={p.name: (p.stat().st_size, file_digest(p)) for p in sorted(temporary.iterdir())},
        )
        write_file(temporary / SLOT_FILE, record.to_json())
        _put_in_place(temporary, path)
    except OSError as err:
        raise OSError(err.errno, f"checkpoint of slot {header.slot} at step {header.step} not written: {err}") from err
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(directory: str | os.PathLike[str], step: int, slot: int) -> tuple[bytearray, int, int]:
    """Read a committed checkpoint back into a buffer as `Capture.read` takes it, with the lengths of its sections.

    IntegrityError if it is not committed, incomplete or damaged.
    """
    directory = Path(directory)
    record = manifest(directory, step).get(slot)
    if record is None:
        raise IntegrityError(f"the checkpoint of step {step} has no slot {slot}: it is of a smaller job")
    path = slot_directory(directory, step, slot)
    verify(path, record)
    memory = bytearray(record.shared_nbytes + record.unique_nbytes)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    head = raw[record.shared_nbytes : record.shared_nbytes + record.header_nbytes]
    load_tensors({HEADER_KEY: head}, path)
    header, capacity = read_header(raw[record.shared_nbytes :].numpy().data, record.shared_nbytes)
    load_tensors(_state(raw, header, record.shared_nbytes, capacity), path)
    return memory, record.shared_nbytes, record.unique_nbytes


def load_header(path: Path, record: SlotRecord) -> Header:
    """The header of a slot's folder that was verified."""
    # Rows are checked against the lengths of their sections, so these must be there; memory that is not touched costs nothing.
    raw = torch.zeros(record.unique_nbytes, dtype=torch.uint8)
    load_tensors({HEADER_KEY: raw[: record.header_nbytes]}, path)
    return read_header(raw.numpy().data, record.shared_nbytes)[0]


def verify(path: Path, record: SlotRecord) -> None:
    """IntegrityError unless the files of a slot are what was written: DCP unpickles its metadata, so nothing else is given to it."""
    for name, (_, digest) in record.files.items():
        if file_digest(path / name) != digest:
            raise IntegrityError(f"{path / name} fails its checksum: this checkpoint cannot be used")


def _state(raw: torch.Tensor, header: Header, shared_nbytes: int, capacity: int) -> dict[str, torch.Tensor]:
    found = views(raw, header.rows, unique_start=shared_nbytes, header_capacity=capacity)
    state = {row.name: view for row, view in zip(header.rows, found, strict=True)}
    state[HEADER_KEY] = raw[shared_nbytes : shared_nbytes + capacity]
    return state


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    writer = FileSystemWriter(path, sync_files=True)
    _undistributed(lambda: state_dict_saver.save(state, storage_writer=writer, no_dist=True))


def load_tensors(into: Mapping[str, torch.Tensor], path: Path) -> None:
    """Fill tensors, by name, from a slot's folder that was verified. OSError or IntegrityError if that fails."""
    state = {name: tensor for name, tensor in into.items() if tensor.numel()}
    reader = FileSystemReader(path)
    _undistributed(lambda: state_dict_loader.load(state, storage_reader=reader, no_dist=True))


def _undistributed(operation: Callable[[], Any]) -> None:
    """Run a DCP operation of this process alone; let the system's error through instead of DCP's wrapper."""
    try:
        with warnings.catch_warnings():
            # It warns that no process group is there, which is the point.
            warnings.simplefilter("ignore", UserWarning)
            operation()
    except CheckpointException as err:
        causes = [failure[0] for failure in err.failures.values()]
        cause = next((c for c in causes if isinstance(c, OSError)), causes[0] if causes else err)
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror or str(cause), cause.filename) from err
        raise IntegrityError(f"the checkpoint cannot be written or read: {cause}") from err
    except RuntimeError as err:
        # torch's zip writer reports a full disk as a RuntimeError.
        raise OSError(f"{err} (is the disk full or read-only?)") from err


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{TEMPORARY_PREFIX}{path.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename the finished folder; an earlier one of the same step and slot (before a recovery) holds the same state."""
    sync_directory(temporary)
    if path.exists():
        old = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-old")
        os.rename(path, old)
        os.rename(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temporary, path)
    sync_directory(path.parent)
    sync_directory(path.parent.parent)
