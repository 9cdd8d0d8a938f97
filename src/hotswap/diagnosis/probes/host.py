"""Probes of the host: memory, disk, /dev/shm, clock, fabric manager. Standard library only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hotswap.diagnosis.probes import smi
from hotswap.diagnosis.probes.runner import Outcome, Status

FREE_SHARE_MIN = 0.05
DISK_BYTES = 8 << 20
DISK_S_MAX = 10.0
SHM_FREE_BYTES_MIN = 64 << 20
CLOCK_ERROR_S_MAX = 1.0
LEFTOVER = "nccl-"
EDAC = Path("/sys/devices/system/edac/mc")
STA_UNSYNC = 0x0040
"""Of ``timex.status``: nobody keeps the kernel's clock (https://man7.org/linux/man-pages/man2/adjtimex.2.html)."""


def memory() -> Outcome:
    """Whether the host has memory to spare."""
    fields = _meminfo()
    share = fields["MemAvailable"] / max(1, fields["MemTotal"])
    measured = {"available_share": share}
    if share < FREE_SHARE_MIN:
        return Outcome(status=Status.FAILED, detail=f"only {share:.1%} of the memory is available", measured=measured)
    return Outcome(status=Status.PASSED, detail=f"{share:.0%} of the memory is available", measured=measured)


def memory_errors() -> Outcome:
    """Whether the kernel has counted memory that is damaged, or errors that could not be corrected (EDAC)."""
    return check_memory_errors(_meminfo().get("HardwareCorrupted", 0), EDAC)


def check_memory_errors(damaged_bytes: int, edac: Path) -> Outcome:
    """The same for given counts; *edac* is the kernel's folder of memory controllers."""
    counts = [path.read_text(encoding="ascii").strip() for path in sorted(edac.glob("mc*/ue_count"))]
    uncorrected = sum(int(count) for count in counts if count.isdigit())
    measured = {"damaged_bytes": float(damaged_bytes), "uncorrected_errors": float(uncorrected)}
    if damaged_bytes or uncorrected:
        detail = f"{damaged_bytes} bytes of memory are damaged, {uncorrected} errors were not corrected"
        return Outcome(status=Status.FAILED, detail=detail, measured=measured)
    return Outcome(status=Status.PASSED, detail="the kernel has counted no damaged memory", measured=measured)


def _meminfo() -> dict[str, int]:
    """In bytes."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines}


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
        return kernel_clock()
    outcome = read_chrony(answer.stdout)
    return kernel_clock() if outcome.status is Status.SKIPPED else outcome


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def kernel_clock() -> Outcome:
    """What the kernel says of its clock to everybody, whichever daemon keeps it."""
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        return Outcome(status=Status.SKIPPED, detail=f"the kernel does not say: {os.strerror(ctypes.get_errno())}")
    return read_timex(timex.status, timex.maxerror)


def read_timex(status: int, error_us: int) -> Outcome:
    """The outcome from what adjtimex(2) gives. That nobody keeps the clock is usual in virtual machines, so it proves nothing."""
    measured = {"error_s_max": error_us / 1e6}
    if status & STA_UNSYNC:
        return Outcome(
            status=Status.SKIPPED, detail="nobody tells the kernel how far its clock is off", measured=measured
        )
    if error_us / 1e6 > CLOCK_ERROR_S_MAX:
        detail = f"the clock may be off by {error_us / 1e6:g} s"
        return Outcome(status=Status.FAILED, detail=detail, measured=measured)
    return Outcome(status=Status.PASSED, detail=f"the clock is off by {error_us / 1e6:g} s at most", measured=measured)


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
    """Whether a node with NVSwitches has its fabric manager. Without one, single GPUs work and NVLink does not.

    The driver knows whether the GPUs have been joined to the fabric; where it is too old to say, the process is looked for.
    """
    rows = smi.query(("fabric.state", "fabric.status"))
    outcome = read_fabric(rows or ())
    if outcome.status is not Status.SKIPPED:
        return outcome
    if not list(Path("/dev").glob("nvidia-nvswitch*")):
        return Outcome(status=Status.SKIPPED, detail="this node has no NVSwitch")
    for process in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = process.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile
        if name.startswith("nv-fabricmanage"):
            return Outcome(status=Status.PASSED, detail="the fabric manager runs")
    if Path("/proc/1/comm").read_text(encoding="utf-8", errors="replace").strip() not in ("systemd", "init"):
        return Outcome(status=Status.SKIPPED, detail="the processes of the host cannot be seen from here")
    return Outcome(status=Status.FAILED, detail="this node has NVSwitches, but no fabric manager runs")


def read_fabric(rows: Sequence[Sequence[str]]) -> Outcome:
    """The outcome from a row of state and status for each GPU."""
    told = [row for row in rows if not row[0].strip("[]").upper().startswith(("N/A", "NOT SUPPORTED"))]
    if not told:
        return Outcome(status=Status.SKIPPED, detail="these GPUs belong to no fabric")
    bad = [f"{state}, {status}" for state, status in told if state != "Completed" or status != "Success"]
    if bad:
        return Outcome(
            status=Status.FAILED, detail=f"{len(bad)} of {len(told)} GPUs are not part of the fabric: {bad[0]}"
        )
    return Outcome(status=Status.PASSED, detail=f"{len(told)} GPUs are part of the fabric")
