"""What the machine itself can say when one of its workers has ended: GPUs, InfiniBand ports, file systems.

Asked once, then, and never while all is well. Everything here may be missing; what is missing is no evidence.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotswap.diagnosis import facts
from hotswap.diagnosis.model import Evidence
from hotswap.node import gpus

INFINIBAND = Path("/sys/class/infiniband")
SMI_S = 10.0
"""A driver that answers later than that is in trouble of a kind that the kernel's log tells better."""
QUERY = (
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_slowdown",
)
FILE_SYSTEMS = ("/dev/shm",)
FULL_PERCENT = 95.0


@dataclass(frozen=True, kw_only=True)
class Port:
    """An InfiniBand or RoCE port; its counters since the driver was loaded."""

    state: str
    link_downed: int
    symbol_errors: int


class Machine:
    """One node's machine."""

    def __init__(self, node: str, infiniband: Path = INFINIBAND) -> None:
        """Remembers where counters stand now."""
        self._node = node
        self._infiniband = infiniband
        self._ports = ports(infiniband)

    def facts(self) -> list[Evidence]:
        """Of the moment, and since the last time."""
        now = time.time()
        return [*self._of_ports(now), *self._of_gpus(now), *self._of_file_systems(now)]

    def _of_ports(self, now: float) -> list[Evidence]:
        before, self._ports = self._ports, ports(self._infiniband)
        found = []
        for name, port in self._ports.items():
            old = before.get(name, port)
            downed, errors = port.link_downed - old.link_downed, port.symbol_errors - old.symbol_errors
            if downed > 0 or errors > 0 or port.state != old.state:
                found.append(
                    facts.ib_port(
                        name,
                        node=self._node,
                        time=now,
                        state=port.state,
                        link_downed_delta=downed,
                        symbol_error_delta=errors,
                    )
                )
        return found

    def _of_gpus(self, now: float) -> list[Evidence]:
        return [
            facts.nvml(
                address_of(row[0]),
                node=self._node,
                time=now,
                ecc_uncorrected=_number(row[1]),
                row_remap_pending=_number(row[2]) > 0 or row[2] == "Yes",
                row_remap_failure=_number(row[3]) > 0 or row[3] == "Yes",
                hw_slowdown=row[4] == "Active",
            )
            for row in _smi()
        ]

    def _of_file_systems(self, now: float) -> list[Evidence]:
        found = []
        for path in FILE_SYSTEMS:
            try:
                status = os.statvfs(path)
            except OSError:
                continue
            used = 100.0 * (1.0 - status.f_bavail / status.f_blocks) if status.f_blocks else 0.0
            if used >= FULL_PERCENT:
                found.append(facts.file_system(path, used, node=self._node, time=now))
        return found


def ports(root: Path = INFINIBAND) -> Mapping[str, Port]:
    """All ports, by ``device/port``."""
    found = {}
    for folder in sorted(root.glob("*/ports/*")):
        try:
            state = (folder / "state").read_text().partition(":")[2].strip()
            downed = int((folder / "counters" / "link_downed").read_text())
            errors = int((folder / "counters" / "symbol_error").read_text())
        except (OSError, ValueError):
            continue
        found[f"{folder.parent.parent.name}/{folder.name}"] = Port(
            state=state, link_downed=downed, symbol_errors=errors
        )
    return found


def address_of(bus_id: str) -> str:
    """A GPU's PCI address as the kernel's log has it (``0000:3d:00``), from NVML's (``00000000:3D:00.0``)."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _smi() -> list[Sequence[str]]:
    """A row for each GPU; none where there are none, or the driver does not answer."""
    if not gpus.visible({}):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(QUERY)]


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0
