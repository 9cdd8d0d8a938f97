"""What a running job, its agents and the machine know without any log, as evidence: one function for each kind.

Times are seconds since the epoch. Nothing is measured here; the caller has the numbers.
"""

from __future__ import annotations

from pathlib import Path

from hotswap.diagnosis.decode import decode
from hotswap.diagnosis.model import Evidence, Value


def exit_status(code: int, *, rank: int, node: str, time: float) -> Evidence:
    """A worker has ended: its exit code, or minus the number of the signal."""
    facts: dict[str, Value] = {"signal": -code} if code < 0 else {"code": code}
    if code > 128:
        facts["signal"] = code - 128
    return Evidence(
        kind="exit", source="agent", node=node, rank=rank, time=time, text=f"exit status {code}", facts=facts
    )


def said(source: str, text: str, *, rank: int | None = None, node: str = "", time: float) -> Evidence:
    """What *source* said, about a worker where *rank* and *node* are given, read as a line of a log would be."""
    kind, fields = decode(text)
    return Evidence(kind=kind, source=source, node=node, rank=rank, time=time, text=text, facts=fields)


def op_count(group: str, issued: int, *, rank: int, time: float) -> Evidence:
    """How many operations a rank has started in a group; the rank that is behind is the suspect."""
    return Evidence(
        kind="op_count",
        source="job",
        rank=rank,
        time=time,
        text=f"{issued} operations in group {group}",
        facts={"group": group, "issued": issued},
    )


def blame(peer: str, *, node: str, rank: int | None = None, time: float) -> Evidence:
    """*node* could not reach *peer* any more."""
    return Evidence(
        kind="blame", source="job", node=node, rank=rank, time=time, text=f"lost {peer}", facts={"peer": peer}
    )


def silent(node: str, *, reachable: bool, time: float) -> Evidence:
    """The node's agent fell silent at *time*; whether the node itself still answers."""
    text = f"{node} fell silent and is {'reachable' if reachable else 'unreachable'}"
    return Evidence(
        kind="silent", source="coordinator", node=node, time=time, text=text, facts={"reachable": reachable}
    )


def nvml(
    gpu: str,
    *,
    node: str,
    time: float,
    ecc_uncorrected: int = 0,
    row_remap_pending: bool = False,
    row_remap_failure: bool = False,
    recovery_action: int = 0,
    fabric_healthy: bool = True,
    hw_slowdown: bool = False,
) -> Evidence:
    """What NVML says about one GPU (*gpu* is its PCI address); counters since the driver was loaded."""
    facts: dict[str, Value] = {
        "ecc_uncorrected": ecc_uncorrected,
        "row_remap_pending": row_remap_pending,
        "row_remap_failure": row_remap_failure,
        "recovery_action": recovery_action,
        "fabric_healthy": fabric_healthy,
        "hw_slowdown": hw_slowdown,
    }
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    return Evidence(kind="nvml", source="nvml", node=node, gpu=gpu, time=time, text=text, facts=facts)


def ib_port(
    port: str, *, node: str, time: float, state: str, link_downed_delta: int = 0, symbol_error_delta: int = 0
) -> Evidence:
    """State of an InfiniBand or RoCE port and how its counters rose while the job ran."""
    facts: dict[str, Value] = {
        "port": port,
        "state": state,
        "link_downed_delta": link_downed_delta,
        "symbol_error_delta": symbol_error_delta,
    }
    text = f"{port} is {state}, link down {link_downed_delta} times, {symbol_error_delta} symbol errors"
    return Evidence(kind="ib_counter", source="infiniband", node=node, time=time, text=text, facts=facts)


def file_system(path: str, used_percent: float, *, node: str, time: float) -> Evidence:
    """How full a file system is; /dev/shm counts as memory of the host."""
    return Evidence(
        kind="shm" if path.startswith("/dev/shm") else "disk",
        source="statvfs",
        node=node,
        time=time,
        text=f"{path} is {used_percent:.1f} % full",
        facts={"path": path, "used_percent": used_percent},
    )


def memory_events(content: str, *, node: str, time: float, path: str = "memory.events") -> Evidence:
    """A cgroup's ``memory.events`` file: what its memory limit did to it."""
    facts: dict[str, Value] = {}
    for line in content.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            facts[name] = int(value)
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    return Evidence(kind="cgroup", source=path, node=node, time=time, text=text, facts=facts)


def oom_kills(killed: int, *, of: str, node: str, time: float) -> Evidence:
    """How many processes the kernel killed for memory meanwhile; *of*: in this ``cgroup`` or on the whole host (``host_kills``)."""
    where = "in the job's control group" if of == "cgroup" else "on the whole host"
    text = f"the kernel killed {killed} processes for memory {where}"
    return Evidence(kind=of, source=of, node=node, time=time, text=text, facts={"oom_kill": killed})


def read_memory_events(path: Path, *, node: str, time: float) -> Evidence:
    """The same, read from the cgroup's file."""
    return memory_events(path.read_text(encoding="ascii"), node=node, time=time, path=str(path))
