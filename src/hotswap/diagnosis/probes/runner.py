"""Runs probes as child processes with deadlines, one after another, and never on GPUs that are in use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import entry_points

from hotswap.diagnosis.model import Evidence
from hotswap.errors import UsageError

GROUP = "hotswap.probes"
BUILTIN: dict[str, str] = {
    name: f"hotswap.diagnosis.probes.{module}:{name}"
    for name, module in (
        ("memory", "host"),
        ("memory_errors", "host"),
        ("disk", "host"),
        ("shared_memory", "host"),
        ("clock", "host"),
        ("fabric_manager", "host"),
        ("gpu_health", "gpu"),
        ("gpu_compute", "gpu"),
        ("gpu_memory", "gpu"),
        ("gpu_collective", "gpu"),
    )
}
"""Probes of hotswap, cheapest first: what they are called and where they are."""

DEADLINE_S = 20.0
"""Time a probe has unless the caller gives another; most of it is the import of torch and the CUDA context."""
KILL_GRACE_S = 2.0
OUTPUT_BYTES_MAX = 64 << 10


class Status(str, Enum):
    """How a probe ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It does not apply to this node, or would have disturbed a running job."""
    HUNG = "hung"
    """It was killed at its deadline, which on hardware is a failure too."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a probe function returns: passed, failed or skipped, a sentence, and what it measured (units in the names)."""

    status: Status
    detail: str
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What became of one probe."""

    name: str
    status: Status
    detail: str
    seconds: float
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the node."""
        return self.status in (Status.PASSED, Status.SKIPPED)


def available() -> dict[str, str]:
    """Names of all probes and where they are (``module:function``); a site's own may replace one of hotswap's."""
    return {**BUILTIN, **{point.name: point.value for point in entry_points(group=GROUP)}}


def run_probes(names: Iterable[str] | None = None, *, deadline_s: float = DEADLINE_S) -> tuple[ProbeResult, ...]:
    """Runs the named probes (default: all) one after another; each has *deadline_s* seconds."""
    known = available()
    chosen = tuple(known) if names is None else tuple(names)
    for name in chosen:
        if name not in known:
            raise UsageError(f"there is no probe {name!r}; there are {', '.join(sorted(known))}")
    return tuple(_run(name, known[name], deadline_s) for name in chosen)


def _run(name: str, target: str, deadline_s: float) -> ProbeResult:
    start = time.monotonic()
    status, detail, measured = _child([sys.executable, "-m", "hotswap.diagnosis.probes.child", target], deadline_s)
    return ProbeResult(
        name=name, status=status, detail=detail, seconds=round(time.monotonic() - start, 3), measured=measured
    )


def _child(command: Sequence[str], deadline_s: float) -> tuple[Status, str, dict[str, float]]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return Status.HUNG, _killed(child, deadline_s), {}
    return _understood(child.returncode, output[-OUTPUT_BYTES_MAX:], errors[-OUTPUT_BYTES_MAX:])


def _killed(child: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Kills the probe and all it started. One that sits in a driver call may not die: it is left, and said so."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        # Popen's own wait at the end of the with block would hang on it for ever.
        child.returncode = -signal.SIGKILL
        return f"did not answer in {deadline_s:g} s and could not even be killed: it hangs in the kernel"
    return f"did not answer in {deadline_s:g} s and was killed"


def _understood(code: int, output: bytes, errors: bytes) -> tuple[Status, str, dict[str, float]]:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
        if code == 0 and isinstance(answer, dict):
            measured = {str(name): float(value) for name, value in answer["measured"].items()}
            return Status(answer["status"]), str(answer["detail"]), measured
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no output"]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Status.FAILED, f"the probe died with {how}: {last[0][:300]}", {}


def as_evidence(results: Iterable[ProbeResult], *, node: str | None, now: float) -> tuple[Evidence, ...]:
    """The results as evidence for :func:`hotswap.diagnosis.diagnose`; what was skipped is none."""
    return tuple(
        Evidence(
            kind="probe",
            source=f"probe {result.name}",
            node=node,
            time=now,
            order=order,
            text=f"probe {result.name} {result.status.value}: {result.detail}",
            facts={"name": result.name, "ok": result.ok},
        )
        for order, result in enumerate(results)
        if result.status is not Status.SKIPPED
    )
