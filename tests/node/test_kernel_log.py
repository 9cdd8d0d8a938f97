"""Records of the kernel, as /dev/kmsg gives them: one a read, from the end on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hotswap.node import kernel_log
from hotswap.node.kernel_log import KMSG, KernelLog

Give = Callable[..., None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """What the next reads of the device return or raise; after that there is nothing to read."""
    queue: list[bytes | OSError] = []

    def read(_fd: int, _size: int) -> bytes:
        if not queue:
            raise BlockingIOError
        item = queue.pop(0)
        if isinstance(item, OSError):
            raise item
        return item

    monkeypatch.setattr(kernel_log.os, "read", read)
    return lambda *items: queue.extend(items)


def test_records_have_a_time_and_their_text_without_continuations(give: Give, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg")
    log = KernelLog(tmp_path / "kmsg")
    microseconds = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6) - 2_000_000
    give(f"6,339,{microseconds},-;NVRM: Xid (PCI:0000:3d:00): 79, pid=1\n SUBSYSTEM=pci\n".encode())
    ((at, text),) = log.read()
    assert text == "NVRM: Xid (PCI:0000:3d:00): 79, pid=1"
    assert abs(at - (time.time() - 2.0)) < 1.0
    assert log.read() == []
    log.close()
    assert log.read() == []


def test_lost_and_malformed_records_are_passed_over(give: Give, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg")
    give(BrokenPipeError(), b"nonsense", b"6,1;no time", b"6,2,x,-;bad time", b"6,3,5,-;a; b\xff")
    assert [text for _, text in KernelLog(tmp_path / "kmsg").read()] == ["a; b\ufffd"]


def test_where_it_cannot_be_read_there_is_nothing(tmp_path: Path) -> None:
    assert KernelLog(tmp_path / "missing").read() == []


def test_a_file_is_followed_line_by_line_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("of yesterday\n")
    log = KernelLog(path)
    with path.open("a") as file:
        file.write(
            "Mar  2 10:00:00 n1 kernel: NVRM: Xid (PCI:0000:3d:00): 79, pid=1\n\n6,1,5000000,-;as kmsg has it\nhalf a l"
        )
    (first, text), (second, of_kmsg) = log.read()
    assert "Xid" in text and abs(first - time.time()) < 60.0
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert of_kmsg == "as kmsg has it" and abs(second - booted - 5.0) < 1.0
    with path.open("a") as file:
        file.write("ine\n")
    assert [text for _, text in log.read()] == ["half a line"]
    path.write_text("rotated\n")
    assert [text for _, text in log.read()] == ["rotated"]
    assert log.read() == []
    log.close()
    assert log.read() == []


def test_a_file_may_be_begun_later(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "kern.log")
    assert log.read() == []
    (tmp_path / "kern.log").write_text("the first line\n")
    assert [text for _, text in log.read()] == ["the first line"]
    log.close()


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason=f"{KMSG} cannot be read here")
def test_the_machines_own_log_can_be_followed() -> None:
    log = KernelLog()
    assert all(isinstance(text, str) for _, text in log.read())
    log.close()
