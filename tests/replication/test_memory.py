"""Memory files: shared between processes, safe to map, gone when nobody holds them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hotswap.errors import UsageError
from hotswap.replication import memory
from hotswap.replication.memory import MemoryFile


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_see_the_same_bytes() -> None:
    mine = MemoryFile.create("test", 10_000)
    theirs = MemoryFile.from_fd(os.dup(mine.fd))
    mine.view()[5000:5005] = b"hello"
    assert theirs.nbytes == 10_000
    assert bytes(theirs.view()[5000:5005]) == b"hello"
    assert bytes(mine.view()[:5000]) == bytes(5000)
    mine.close()
    theirs.close()


def test_another_process_writes_into_it_and_may_then_die() -> None:
    shared = MemoryFile.create("test", 4096)
    script = (
        "import sys, os, signal; from hotswap.replication.memory import MemoryFile;"
        "MemoryFile.from_fd(int(sys.argv[1])).view()[:4] = b'done'; os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(shared.fd)],
        pass_fds=[shared.fd],
        timeout=30,
        env=_environment(),
        check=False,
    )
    assert child.returncode < 0
    assert bytes(shared.view()[:4]) == b"done"
    shared.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_nobody_can_shrink_it_under_a_mapping() -> None:
    file = MemoryFile.create("test", 8192)
    for nbytes in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, nbytes)
    file.close()


def test_it_is_not_inherited_by_programs_that_are_started() -> None:
    file = MemoryFile.create("test", 1)
    assert not os.get_inheritable(file.fd)
    file.close()


def test_a_descriptor_that_could_be_shrunk_is_refused() -> None:
    unsealed = os.memfd_create("test")
    with pytest.raises(UsageError, match="shrunk"):
        MemoryFile.from_fd(unsealed)
    reader, writer = os.pipe()
    with pytest.raises(UsageError, match="not a memory file"):
        MemoryFile.from_fd(reader)
    for fd in (unsealed, reader, writer):
        os.close(fd)


def test_close_frees_descriptors_and_mapping_even_with_a_slice_in_use() -> None:
    before = open_fds()
    file = MemoryFile.create("hotswap-leak-test", 1 << 20)
    part = file.view()[10:20]
    part[:] = b"0123456789"
    file.close()
    file.close()
    assert file.closed
    assert bytes(part) == b"0123456789"
    del part
    assert open_fds() == before
    assert "hotswap-leak-test" not in Path("/proc/self/maps").read_text()


def test_much_memory_is_freed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.replication.memory.ASIDE_NBYTES", 1 << 20)
    before = open_fds()
    file = MemoryFile.create("hotswap-aside-test", 1 << 20)
    file.view()[:3] = b"abc"
    may_close, close = threading.Event(), os.close

    def slow_close(fd: int) -> None:
        assert may_close.wait(10)
        close(fd)

    monkeypatch.setattr("hotswap.replication.memory.os.close", slow_close)
    file.close()
    assert file.closed
    assert open_fds() > before
    may_close.set()
    for thread in threading.enumerate():
        if thread.name == "hotswap-free":
            thread.join(10)
    assert open_fds() == before
    assert "hotswap-aside-test" not in Path("/proc/self/maps").read_text()


def test_a_long_or_strange_name_does_no_harm() -> None:
    file = MemoryFile.create("ü" * 400, 1)
    file.close()


def test_short_memory_is_said_before_the_kernel_kills_someone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(memory, "memory_available_bytes", lambda: 1000)
    with pytest.raises(UsageError, match=r"'replica 3': 1001 bytes asked, 1000 bytes are available.*fewer workers"):
        MemoryFile.create("replica 3", 1001)
    assert open_fds() == before


def test_a_kernel_that_refuses_is_reported_and_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_fds()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match=r"5 bytes asked, .*No space left"):
        MemoryFile.create("x", 5)
    assert open_fds() == before


def test_the_tightest_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "batch" / "job"
    job.mkdir(parents=True)
    (tmp_path / "self").write_text("1:name=systemd:/\n0::/batch/job\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "SELF_CGROUP", tmp_path / "self")
    for group, limit, used, cache in ((job, "max", 10, 0), (tmp_path / "batch", "5000", 4000, 300)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    assert memory.memory_available_bytes() == 1300
    (job / "memory.max").write_text("30\n")
    assert memory.memory_available_bytes() == 20


def test_without_control_groups_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SELF_CGROUP", tmp_path / "none")
    assert memory.memory_available_bytes() > 1 << 20
