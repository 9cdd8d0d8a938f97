"""Which durable checkpoints count: their folders, manifests and upkeep. Imports no torch.

    <directory>/step-00000012/slot-0003/slot.json     written by hotswap.replication.durable, one DCP folder per slot
    <directory>/step-00000012/manifest.json           written last: without it the step does not exist

A folder gets its final name only when everything in it has reached the disk, so a crash leaves nothing half-valid.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotswap.errors import IntegrityError, UsageError

SLOT_FILE = "slot.json"
MANIFEST_FILE = "manifest.json"
TEMPORARY_PREFIX = ".new-"
_FORMAT = 1
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What comes of reading a file that holds something else than it should."""
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """What is known about one slot's folder. ``files`` maps a name to its length in bytes and its SHA-256."""

    slot: int
    step: int
    generation: int
    shared_nbytes: int
    unique_nbytes: int
    header_nbytes: int
    files: dict[str, tuple[int, str]]

    def to_json(self) -> bytes:
        """As it is stored."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> SlotRecord:
        """Parse it. IntegrityError if it is something else."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != _FORMAT:
                raise IntegrityError(f"{path} has another format than {_FORMAT}: written by another version of hotswap")
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in fields.pop("files").items()}
            return cls(files=files, **{name: int(value) for name, value in fields.items()})
        except _DAMAGED as err:
            raise IntegrityError(f"{path} is damaged: {err}; this checkpoint cannot be used") from err


def step_directory(directory: Path, step: int) -> Path:
    """Folder of one step."""
    return directory / f"step-{step:08d}"


def slot_directory(directory: Path, step: int, slot: int) -> Path:
    """Folder of one slot at one step."""
    return step_directory(directory, step) / f"slot-{slot:04d}"


def record(path: Path) -> SlotRecord:
    """What a slot's folder says of itself. OSError or IntegrityError if it cannot be read."""
    return SlotRecord.from_json((path / SLOT_FILE).read_bytes(), path / SLOT_FILE)


def is_there(path: Path, step: int, slot: int, generation: int) -> bool:
    """Whether a slot's folder holds, whole, the state that a snapshot of that step and generation holds."""
    with contextlib.suppress(OSError, IntegrityError):
        found = _require_complete(path, (path / SLOT_FILE).read_bytes())
        return (found.step, found.slot, found.generation) == (step, slot, generation)
    return False


def commit(directory: Path, step: int, generations: Mapping[int, int]) -> None:
    """Make ``step`` count, now that the folders of all slots are there, each of the generation that is given for it.

    UsageError if one is missing or incomplete, IntegrityError if one is of another generation (a node that was given up
    may still write), OSError if the disk refuses; then the step does not count.
    """
    folder = step_directory(Path(directory), step)
    records = {}
    for slot, generation in sorted(generations.items()):
        path = slot_directory(Path(directory), step, slot)
        if not (path / SLOT_FILE).is_file():
            raise UsageError(
                f"the checkpoint of step {step} lacks slot {slot} ({path}): wait until every slot is written"
            )
        text = (path / SLOT_FILE).read_bytes()
        written = _require_complete(path, text)
        if written.generation != generation:
            raise IntegrityError(f"{path} is of generation {written.generation}, not {generation}: it was undone")
        records[str(slot)] = hashlib.sha256(text).hexdigest()
    manifest = {"format": _FORMAT, "step": step, "slots": records}
    write_file(folder / MANIFEST_FILE, json.dumps(manifest, indent=1, sort_keys=True).encode())


def latest(directory: Path) -> int | None:
    """The newest step that was committed and whose files all have their length; None if there is none.

    What cannot be read does not count now: who asks must not fail because storage does.
    """
    with contextlib.suppress(OSError):
        for step in sorted(_steps(Path(directory)), reverse=True):
            with contextlib.suppress(IntegrityError, OSError):
                manifest(Path(directory), step)
                return step
    return None


def manifest(directory: Path, step: int) -> dict[int, SlotRecord]:
    """The slots of a committed step. IntegrityError if it is not committed or incomplete."""
    path = step_directory(directory, step) / MANIFEST_FILE
    try:
        fields = json.loads(path.read_bytes())
        digests = {int(slot): str(digest) for slot, digest in fields["slots"].items()}
        if fields["format"] != _FORMAT or fields["step"] != step:
            raise IntegrityError(f"{path} is of step {fields['step']}, format {fields['format']}")
    except FileNotFoundError as err:
        raise IntegrityError(f"the checkpoint of step {step} was never committed ({path} is missing)") from err
    except _DAMAGED as err:
        raise IntegrityError(f"{path} is damaged: {err}; this checkpoint cannot be used") from err
    return {slot: _verified(slot_directory(directory, step, slot), digest) for slot, digest in digests.items()}


def prune(directory: Path, keep: int) -> list[int]:
    """Delete all but the newest ``keep`` committed steps, and unfinished ones older than the newest; return them.

    An unfinished step that is newer than the newest committed one is being written, and stays.
    """
    if keep < 1:
        raise UsageError(f"keep={keep} would delete the only checkpoint: keep at least 1")
    directory = Path(directory)
    committed = [step for step in sorted(_steps(directory)) if _is_committed(directory, step)]
    if not committed:
        return []
    kept = {*committed[-keep:], *(step for step in _steps(directory) if step > committed[-1])}
    dropped = sorted(set(_steps(directory)) - kept)
    for step in dropped:
        folder = step_directory(directory, step)
        # First it stops counting, then it goes: a crash in between leaves an unfinished step, not a damaged one.
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return dropped


def write_file(path: Path, content: bytes) -> None:
    """Put a small file in place as a whole, on disk when this returns. OSError if that fails."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def _steps(directory: Path) -> Iterator[int]:
    if directory.is_dir():
        for path in directory.iterdir():
            match = _STEP.fullmatch(path.name)
            if match:
                yield int(match[1])


def _is_committed(directory: Path, step: int) -> bool:
    try:
        manifest(directory, step)
    except IntegrityError:
        return False
    return True


def _verified(path: Path, digest: str) -> SlotRecord:
    try:
        text = (path / SLOT_FILE).read_bytes()
    except FileNotFoundError as err:
        raise IntegrityError(f"{path} is missing or incomplete: this checkpoint cannot be used") from err
    if hashlib.sha256(text).hexdigest() != digest:
        raise IntegrityError(f"{path / SLOT_FILE} is not the file the manifest names: this checkpoint cannot be used")
    return _require_complete(path, text)


def _require_complete(path: Path, text: bytes) -> SlotRecord:
    record = SlotRecord.from_json(text, path / SLOT_FILE)
    for name, (nbytes, _) in record.files.items():
        found: Any = "no"
        # There is no such file, or there can be none of that name.
        with contextlib.suppress(FileNotFoundError, ValueError), _no_such_name():
            found = (path / name).stat().st_size
        if found != nbytes:
            raise IntegrityError(
                f"{path / name} has {found} bytes, {nbytes} were written: this checkpoint cannot be used"
            )
    return record


@contextlib.contextmanager
def _no_such_name() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno not in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP):
            raise
