"""Probes of the host: memory, disk, /dev/shm, clock, fabric manager. Standard library only."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from hotswap.diagnosis.probes.runner import Outcome, Status

FREE_SHARE_MIN = 0.05
DISK_BYTES = 8 << 20
DISK_S_MAX = 10.0
SHM_FREE_BYTES_MIN = 64 << 20
CLOCK_ERROR_S_MAX = 1.0
LEFTOVER = "nccl-"


def memory() -> Outcome:
    """Whether the host has memory to spare, and the kernel has not counted damaged pages."""
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    share = fields["MemAvailable"] / max(1, fields["MemTotal"])
    damaged = fields.get("HardwareCorrupted", 0)
    measured = {"available_share": share, "damaged_bytes": float(damaged)}
    if damaged:
        return Outcome(status=Status.FAILED, detail=f"{damaged} bytes of memory are damaged", measured=measured)
    if share < FREE_SHARE_MIN:
        return Outcome(status=Status.FAILED, detail=f"only {share:.1%} of the memory is available", measured=measured)
    return Outcome(status=Status.PASSED, detail=f"{share:.0%} of the memory is available", measured=measured)


def disk() -> Outcome:
    """Writes a small file where temporary files go, reads it back past the page cache, and compares."""
    return check_directory(Path(tempfile.gettempdir()))


def check_directory(directory: Path) -> Outcome:
    """The disk probe for one directory, so that a site can have one for each of its mounts."""
    content = os.urandom(1 << 20) * (DISK_BYTES >> 20)
    start = time.monotonic()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        same = hashlib.sha256(file.read()).digest() == hashlib.sha256(content).digest()
    seconds = time.monotonic() - start
    measured = {"write_read_s": seconds}
    if not same:
        return Outcome(
            status=Status.FAILED, detail=f"{directory} returned other bytes than were written", measured=measured
        )
    if seconds > DISK_S_MAX:
        return Outcome(status=Status.FAILED, detail=f"{directory} took {seconds:.1f} s for 8 MiB", measured=measured)
    return Outcome(
        status=Status.PASSED, detail=f"{directory} wrote and read 8 MiB in {seconds:.2f} s", measured=measured
    )


def shared_memory() -> Outcome:
    """Whether /dev/shm has room, and how much of it dead jobs left behind. Nothing is deleted."""
    return check_shared_memory(Path("/dev/shm"))


def check_shared_memory(directory: Path) -> Outcome:
    """The same for another directory."""
    if not directory.is_dir():
        return Outcome(status=Status.SKIPPED, detail=f"there is no {directory}")
    free = shutil.disk_usage(directory).free
    left = sum(1 for entry in directory.iterdir() if entry.name.startswith(LEFTOVER))
    measured = {"free_bytes": float(free), "leftovers": float(left)}
    if free < SHM_FREE_BYTES_MIN:
        detail = f"{directory} has {free >> 20} MiB free and {left} files of earlier communicators"
        return Outcome(status=Status.FAILED, detail=detail, measured=measured)
    return Outcome(status=Status.PASSED, detail=f"{directory} has {free >> 20} MiB free", measured=measured)


def clock() -> Outcome:
    """Whether the kernel believes its clock is synchronised, and how far off it may be."""
    try:
        answer = subprocess.run(["chronyc", "-n", "tracking"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Outcome(status=Status.SKIPPED, detail="there is no chrony to ask")
    return read_chrony(answer.stdout)


def read_chrony(text: str) -> Outcome:
    """The outcome from the text of ``chronyc tracking``."""
    fields = dict(
        line.split(" : ", 1) for line in (one.replace("  ", " ") for one in text.splitlines()) if " : " in line
    )
    named = {name.strip(): value.strip() for name, value in fields.items()}
    if "System time" not in named:
        return Outcome(status=Status.SKIPPED, detail="chrony gave no answer")
    off = float(named["System time"].split()[0])
    if named.get("Leap status") == "Not synchronised" or off > CLOCK_ERROR_S_MAX:
        return Outcome(
            status=Status.FAILED, detail=f"the clock is off by {off} s or not synchronised", measured={"off_s": off}
        )
    return Outcome(status=Status.PASSED, detail=f"the clock is off by {off} s", measured={"off_s": off})


def fabric_manager() -> Outcome:
    """Whether a node with NVSwitches has its fabric manager. Without one, single GPUs work and NVLink does not."""
    if not list(Path("/dev").glob("nvidia-nvswitch*")):
        return Outcome(status=Status.SKIPPED, detail="this node has no NVSwitch")
    for process in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = process.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile
        if name.startswith("nv-fabricmanage"):
            return Outcome(status=Status.PASSED, detail="the fabric manager runs")
    return Outcome(status=Status.FAILED, detail="this node has NVSwitches, but no fabric manager runs")
