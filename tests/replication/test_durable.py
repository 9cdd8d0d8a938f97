from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from hotswap.errors import IntegrityError, UsageError
from hotswap.integrations import discover
from hotswap.replication import durable, durable_index
from hotswap.replication.capture import Capture

Snapshot = tuple[bytearray, int, int]


@pytest.fixture(scope="module")
def snapshots() -> list[Snapshot]:
    """Of one slot (number 0) at steps 0 to 3."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    capture = Capture(discover(model, optimizer))
    found = []
    for step in range(4):
        buffer = bytearray(capture.nbytes())
        found.append((buffer, *capture.write(buffer, slot=0, generation=1, step=step)))
        model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return found


def write(snapshot: Snapshot, directory: Path, step: int, slot: int = 0) -> None:
    fd = os.memfd_create("snapshot")
    try:
        os.write(fd, snapshot[0])
        path = durable_index.slot_directory(directory, step, slot)
        durable.write(fd, len(snapshot[0]), snapshot[1], snapshot[2], path)
    finally:
        os.close(fd)


def test_what_was_written_comes_back(snapshots: list[Snapshot], tmp_path: Path) -> None:
    write(snapshots[2], tmp_path, 2)
    durable_index.commit(tmp_path, 2, {0: 1})
    memory, shared, unique = durable.load(tmp_path, 2, 0)
    assert (shared, unique) == snapshots[2][1:]
    restored = fresh()
    restored.read(memory, shared, unique, slot=0, step=2, heavy=True)
    direct = fresh()
    direct.read(*snapshots[2], slot=0, step=2, heavy=True)
    assert restored.digest() == direct.digest()


def fresh() -> Capture:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64)).to(torch.bfloat16)
    return Capture(discover(model, torch.optim.AdamW(model.parameters())))


def test_it_is_an_ordinary_dcp_checkpoint(snapshots: list[Snapshot], tmp_path: Path) -> None:
    write(snapshots[1], tmp_path, 1)
    metadata = FileSystemReader(durable_index.slot_directory(tmp_path, 1, 0)).read_metadata()
    entry = metadata.state_dict_metadata["model/optimizer.0.0.0.state.exp_avg"]
    assert (entry.size, entry.properties.dtype) == (torch.Size([64, 8]), torch.bfloat16)


def test_a_step_counts_only_when_committed(snapshots: list[Snapshot], tmp_path: Path) -> None:
    assert durable_index.latest(tmp_path / "absent") is None
    for slot in (0, 1):
        write(snapshots[1], tmp_path, 1, slot)
    assert durable_index.latest(tmp_path) is None
    with pytest.raises(IntegrityError, match="never committed"):
        durable.load(tmp_path, 1, 0)
    durable_index.commit(tmp_path, 1, {0: 1, 1: 1})
    assert durable_index.latest(tmp_path) == 1
    write(snapshots[2], tmp_path, 2)
    with pytest.raises(UsageError, match="lacks slot 1"):
        durable_index.commit(tmp_path, 2, {0: 1, 1: 1})
    assert durable_index.latest(tmp_path) == 1
    with pytest.raises(IntegrityError, match="no slot 2"):
        durable.load(tmp_path, 1, 2)


def truncate(path: Path) -> None:
    os.truncate(next(path.glob("*.distcp")), 100)


def remove(path: Path) -> None:
    shutil.rmtree(path)


def forge_slot_file(path: Path) -> None:
    fields = json.loads((path / "slot.json").read_text())
    (path / "slot.json").write_text(json.dumps({**fields, "generation": 9}))


def empty_slot_file(path: Path) -> None:
    (path / "slot.json").write_text("")


def break_manifest(path: Path) -> None:
    (path.parent / "manifest.json").write_text("[]")


def wrong_manifest(path: Path) -> None:
    manifest = path.parent / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 7}))


@pytest.mark.parametrize(
    "damage",
    [truncate, remove, forge_slot_file, empty_slot_file, break_manifest, wrong_manifest],
    ids=lambda d: d.__name__,
)
def test_an_incomplete_step_is_passed_over(
    snapshots: list[Snapshot], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for step in (1, 2):
        write(snapshots[step], tmp_path, step)
        durable_index.commit(tmp_path, step, {0: 1})
    damage(durable_index.slot_directory(tmp_path, 2, 0))
    assert durable_index.latest(tmp_path) == 1
    with pytest.raises(IntegrityError):
        durable.load(tmp_path, 2, 0)


def test_flipped_bits_are_found_before_anything_is_read(snapshots: list[Snapshot], tmp_path: Path) -> None:
    write(snapshots[1], tmp_path, 1)
    durable_index.commit(tmp_path, 1, {0: 1})
    for name in (".metadata", "__0_0.distcp"):
        path = durable_index.slot_directory(tmp_path, 1, 0) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match="checksum"):
            durable.load(tmp_path, 1, 0)


def test_a_step_can_be_written_again(snapshots: list[Snapshot], tmp_path: Path) -> None:
    write(snapshots[1], tmp_path, 1)
    write(snapshots[1], tmp_path, 1)
    durable_index.commit(tmp_path, 1, {0: 1})
    assert durable_index.latest(tmp_path) == 1
    assert [p.name for p in durable_index.step_directory(tmp_path, 1).iterdir() if p.is_dir()] == ["slot-0000"]


def test_a_shard_of_an_undone_future_makes_no_checkpoint(snapshots: list[Snapshot], tmp_path: Path) -> None:
    """A node that was given up may go on writing, over the shard that was meant."""
    for slot in (0, 1):
        write(snapshots[1], tmp_path, 1, slot)
    with pytest.raises(IntegrityError, match="of generation 1, not 2"):
        durable_index.commit(tmp_path, 1, {0: 1, 1: 2})
    assert durable_index.latest(tmp_path) is None


@contextmanager
def full_disk() -> Iterator[None]:
    """Files end after 3 kB (the process gets EFBIG, which takes the same way as ENOSPC).

    No longer than the write under test: the limit also holds for the file that this process prints its progress to.
    """
    old_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, old_signal)


def test_a_full_disk_leaves_older_checkpoints_alone(snapshots: list[Snapshot], tmp_path: Path) -> None:
    write(snapshots[1], tmp_path, 1)
    durable_index.commit(tmp_path, 1, {0: 1})
    fd = os.memfd_create("snapshot")
    os.write(fd, snapshots[2][0])
    path = durable_index.slot_directory(tmp_path, 2, 0)
    with pytest.raises(OSError, match=r"slot 0 at step 2 not written"), full_disk():
        durable.write(fd, len(snapshots[2][0]), *snapshots[2][1:], path)
    os.close(fd)
    assert list(durable_index.step_directory(tmp_path, 2).iterdir()) == []
    assert durable_index.latest(tmp_path) == 1
    durable.load(tmp_path, 1, 0)


def test_a_read_only_disk_is_an_error(
    snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        write(snapshots[1], tmp_path, 1)
    assert caught.value.errno == errno.EROFS


def test_prune_keeps_the_newest(snapshots: list[Snapshot], tmp_path: Path) -> None:
    for step in range(4):
        write(snapshots[step], tmp_path, step)
        if step != 1:
            durable_index.commit(tmp_path, step, {0: 1})
    write(snapshots[3], tmp_path, 9)  # still being written
    assert durable_index.prune(tmp_path, 1) == [0, 1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000009"]
    assert durable_index.latest(tmp_path) == 3
    assert durable_index.prune(tmp_path / "absent", 1) == []
    with pytest.raises(UsageError, match="keep at least 1"):
        durable_index.prune(tmp_path, 0)


def test_the_index_needs_no_torch() -> None:
    code = "import sys, hotswap.replication.durable_index; assert 'torch' not in sys.modules"
    source = str(Path(durable_index.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source}, timeout=60)


def test_the_same_state_is_written_once(snapshots: list[Snapshot], tmp_path: Path) -> None:
    """A manifest may name the first one by now, and no two folders of one state are the same bytes."""
    write(snapshots[2], tmp_path, 2)
    durable_index.commit(tmp_path, 2, {0: 1})
    write(snapshots[2], tmp_path, 2)
    assert durable_index.latest(tmp_path) == 2
    path = durable_index.slot_directory(tmp_path, 2, 0)
    assert durable_index.is_there(path, 2, 0, 1)
    assert not durable_index.is_there(path, 2, 0, 2) and not durable_index.is_there(path.with_name("none"), 2, 0, 1)
    next(file for file in path.iterdir() if file.suffix == ".distcp").write_bytes(b"torn")
    assert not durable_index.is_there(path, 2, 0, 1)
    write(snapshots[2], tmp_path, 2)
    assert durable_index.is_there(path, 2, 0, 1), "what is not whole is written anew"
