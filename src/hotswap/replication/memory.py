"""Anonymous shared memory that outlives no one: a memory file of the kernel, passed on by its descriptor.

There is no name in any file system, so nothing is left behind however its users die, and no size limit of a mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from pathlib import Path

from hotswap.errors import UsageError

NAME_BYTES_MAX = 249
# From linux/fcntl.h; the fcntl module has them only in some builds.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SHRINK = 2
F_SEAL_GROW = 4
CGROUPS = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")
ASIDE_NBYTES = 256 << 20
"""From here on freeing takes long enough to be done aside."""
_SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW


class MemoryFile:
    """Bytes that several processes can map. Pages are committed at creation and the size is sealed.

    The seal is what makes a mapping safe: touching a page behind a shrunken end kills the process with SIGBUS.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Use ``create`` or ``from_fd``; the object owns *fd*."""
        self._fd = fd
        self._nbytes = nbytes
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    @classmethod
    def create(cls, name: str, nbytes: int) -> MemoryFile:
        """New zeroed memory of *nbytes* bytes; *name* shows in ``/proc/<pid>/fd``. UsageError if memory is short."""
        assert nbytes >= 1, f"a memory file of {nbytes} bytes"
        require_available(name, nbytes)
        label = name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, F_ADD_SEALS, _SIZE_SEALS)
        except OSError as error:
            os.close(fd)
            raise _short(name, nbytes, str(error)) from None
        return cls(fd, nbytes)

    @classmethod
    def from_fd(cls, fd: int) -> MemoryFile:
        """Memory made by another process; takes ownership of *fd*. UsageError if its size is not sealed."""
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
        except OSError as error:
            raise UsageError(f"descriptor {fd} is not a memory file: {error}") from None
        if seals & F_SEAL_SHRINK == 0:
            raise UsageError(f"descriptor {fd} may be shrunk by others; use MemoryFile.create to make it")
        return cls(fd, os.fstat(fd).st_size)

    @property
    def fd(self) -> int:
        """The descriptor, for passing on and for ``sendfile``."""
        assert self._fd >= 0, "this memory file is closed"
        return self._fd

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._fd < 0

    def view(self, *, populate: bool = False) -> memoryview:
        """All the bytes, writable and shared with every other process that maps them. Mapped at the first call.

        *populate*: enter all pages into this process's tables then, at about 2 GB/s, and not one by one when they are used.
        """
        if self._view is None:
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(self.fd, self._nbytes, flags=flags)
            self._view = memoryview(self._map)
        return self._view

    def read_into(self, view: memoryview, offset: int) -> None:
        """Copy the bytes from *offset* on to *view*, while other threads run: an assignment between views would keep them waiting."""
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], offset + done)
            assert got, f"a memory file of {self._nbytes} bytes was read at {offset + done}"
            done += got

    def close(self) -> None:
        """Give up this process's hold. Slices of the view that are still in use keep the pages until they go.

        Much memory takes the kernel a second or more to free: that is left to a thread.
        """
        fd, view, mapping = self._fd, self._view, self._map
        if fd < 0:
            return
        self._fd, self._view, self._map = -1, None, None

        def free() -> None:
            os.close(fd)
            # A slice someone still holds refuses the release; the mapping then goes when that slice does.
            with contextlib.suppress(BufferError):
                if view is not None:
                    view.release()
                if mapping is not None:
                    mapping.close()

        if self._nbytes < ASIDE_NBYTES:
            free()
        else:
            threading.Thread(target=free, name="hotswap-free").start()


def require_available(name: str, nbytes: int) -> None:
    """UsageError if so much memory cannot be had now."""
    available = memory_available_bytes()
    if nbytes > available:
        raise _short(name, nbytes, f"{available} bytes are available on this host or in its control group")


def memory_available_bytes() -> int:
    """Bytes that can be had without swapping or meeting the out-of-memory killer, as far as the kernel tells."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    host = int(fields["MemAvailable"].split()[0]) * 1024
    return min([host, *_groups_available_bytes()])


def control_group_file(name: str) -> str:
    """The file *name* of this process's control group, empty where there is none."""
    inner = _own_group()
    try:
        return (inner / name).read_text() if inner is not None else ""
    except OSError:
        return ""


def _own_group() -> Path | None:
    try:
        lines = SELF_CGROUP.read_text().splitlines()
        return CGROUPS / next(line for line in lines if line.startswith("0::"))[len("0::/") :]
    except (OSError, StopIteration):
        return None


def _groups_available_bytes() -> list[int]:
    """What the process's control group and those around it have left; batch systems limit jobs that way."""
    inner = _own_group()
    if inner is None:
        return []
    return [left for group in (inner, *inner.parents) if (left := _group_available_bytes(group)) is not None]


def _group_available_bytes(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # The page cache of files counts as used and is given back on demand.
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        # No such group, or no limit ("max").
        return None


def _short(name: str, nbytes: int, why: str) -> UsageError:
    return UsageError(
        f"no memory for {name!r}: {nbytes} bytes asked, {why}. Snapshots need host memory: run fewer workers per node, "
        "shard the optimizer over more of them, turn durable checkpoints off (one buffer less), or use larger hosts"
    )
