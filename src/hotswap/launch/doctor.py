"""``hotswap doctor``: can hotswap work here, and which deadlines would a job have? Nothing is started, torch is not imported."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from hotswap.core import ladder
from hotswap.core.limits import Limits
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR
from hotswap.launch import deadlines
from hotswap.replication import crc

PYTHON_MIN = (3, 10)
TORCH_MIN = (2, 11)
SHM_BYTES_MIN = 64 << 20
FILES_MIN = 4096
"""Each group has a socket to each of its members, in every worker; an agent has a memory file for each snapshot."""
LOOKUP_S_MAX = 1.0
MIB = 1 << 20
GOOD, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``status``: ``bad`` if jobs will fail here, ``note`` if something will be missing or slow."""

    name: str
    status: str
    detail: str


def examine() -> Iterator[Finding]:
    """All checks; none of them waits for long, and none changes anything."""
    checks: Sequence[Callable[[], tuple[str, str]]] = (
        *(_python, _torch, _msgspec, _memory, _shared_memory, _open_files, _processes, _locked_memory),
        *(_checksums, _memory_files, _loopback, _own_name, _ports, _stacks),
    )
    for check in checks:
        try:
            status, detail = check()
        except OSError as error:
            status, detail = BAD, str(error)
        yield Finding(name=check.__name__.strip("_").replace("_", " "), status=status, detail=detail)


def _python() -> tuple[str, str]:
    return GOOD if sys.version_info >= PYTHON_MIN else BAD, f"{platform.python_version()} on {platform.platform()}"


def _torch() -> tuple[str, str]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return BAD, "torch is not installed"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return (GOOD, version) if numbers >= TORCH_MIN else (BAD, f"{version}; at least {TORCH_MIN[0]}.{TORCH_MIN[1]}")


def _msgspec() -> tuple[str, str]:
    try:
        return GOOD, metadata.version("msgspec")
    except metadata.PackageNotFoundError:
        return BAD, "msgspec is not installed"


def _memory() -> tuple[str, str]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    text = f"{fields['MemAvailable'] // MIB} of {fields['MemTotal'] // MIB} MiB available"
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (bound := limit.read_text().strip()) != "max":
        text += f", this control group's limit is {int(bound) // MIB} MiB"
    return GOOD, text + "; snapshots and replicas take twice the state that each slot saves, and as much for its peer"


def _shared_memory() -> tuple[str, str]:
    free = shutil.disk_usage("/dev/shm").free
    status = GOOD if free >= SHM_BYTES_MIN else NOTE
    return status, f"{free // MIB} MiB free in /dev/shm; hotswap needs none, NCCL and data loaders do"


def _open_files() -> tuple[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= FILES_MIN:
        return GOOD, f"{soft} open files"
    return NOTE, f"{soft} open files may be too few for many process groups (ulimit -n {min(hard, 65536)})"


def _processes() -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return GOOD, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} processes and threads"


def _locked_memory() -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return GOOD, "no limit"
    return NOTE, f"{soft // 1024} KiB; InfiniBand needs more (ulimit -l unlimited)"


def _checksums() -> tuple[str, str]:
    if crc.BY == "zlib":
        return NOTE, "of replicas by zlib; several times as fast with ISA-L (pip install 'hotswap[fast]')"
    return GOOD, f"of replicas by {crc.BY}"


def _memory_files() -> tuple[str, str]:
    os.close(os.memfd_create("hotswap-doctor"))
    return GOOD, "memfd_create works"


def _loopback() -> tuple[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 1.0):
        return GOOD, "127.0.0.1 can be reached"


def _own_name() -> tuple[str, str]:
    """Torch and others look it up at every start; a name server that does not answer costs them many seconds."""
    name, began = socket.gethostname(), time.monotonic()
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        found = f"nothing ({error})"
    took = time.monotonic() - began
    slow = took > LOOKUP_S_MAX
    advice = "; put it into /etc/hosts, or set RES_OPTIONS='timeout:1 attempts:1'" if slow else ""
    return NOTE if slow else GOOD, f"{name} is {found}, after {took:.1f} s{advice}"


def _ports() -> tuple[str, str]:
    low, high = (int(part) for part in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return GOOD if high - low >= 10_000 else NOTE, f"{low} to {high} for connections; each group takes some"


def _stacks() -> tuple[str, str]:
    """What a worker that hangs can be asked."""
    if shutil.which("py-spy"):
        return GOOD, "faulthandler, and py-spy where that does not answer"
    return GOOD, "faulthandler; with py-spy also where a process does not answer (pip install py-spy)"


def _as_text(rungs: Sequence[Mapping[str, str]]) -> str:
    """What is tried, in this order, before a job is given up."""
    return "\n".join(
        f"{rung['rung']:12} {rung['answers']}: {rung['does']} ({rung['bound']}; then {rung['then']})" for rung in rungs
    )


def main(argv: list[str]) -> int:
    """Entry point of ``hotswap doctor``; 1 if jobs would fail here, 2 for deadlines that cannot work."""
    parser = argparse.ArgumentParser(prog="hotswap doctor", description="Can hotswap work here? Which deadlines hold?")
    deadlines.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--ladder", action="store_true", help="only say what is tried before a job is given up")
    args = parser.parse_args(argv)
    timing = deadlines.timing_of(args)
    rungs = ladder.table(Limits(nodes_active=1, nodes_max=1, width=1, phase_s=timing.phase_s))
    if args.ladder:
        print(json.dumps(rungs) if args.json else _as_text(rungs))
        return EXIT_OK
    findings = list(examine())
    good = all(finding.status != BAD for finding in findings)
    if args.json:
        table = {name: {"seconds": seconds, "meaning": meaning} for name, seconds, meaning in timing.table()}
        print(
            json.dumps(
                {"ok": good, "checks": [asdict(finding) for finding in findings], "deadlines": table, "ladder": rungs}
            )
        )
    else:
        for finding in findings:
            print(f"{finding.status:5} {finding.name:15} {finding.detail}")
        print(f"\n{deadlines.as_text(timing)}\n\n{_as_text(rungs)}")
    return EXIT_OK if good else EXIT_USER_ERROR
