"""Probes on real GPUs: they pass on healthy ones, stay within their memory, and leave alone what somebody uses.

Needs CUDA devices that nobody else uses: ``python -m pytest -m gpu tests/gpu/test_probes_on_gpus.py -s`` also prints what
was measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hotswap.diagnosis.probes import smi
from hotswap.diagnosis.probes.gpu import MEMORY_BYTES_MAX

GPUS = smi.gpus() or []
NAMES = ["gpu_health", "gpu_compute", "gpu_memory", "gpu_collective", "fabric_manager"]
CONTEXT_BYTES_MAX = 2 << 30
"""CUDA's context, NCCL's buffers and torch's libraries."""
HOLD_BYTES = 3 << 30
USER = f"""
import sys, time, torch
held = torch.ones({HOLD_BYTES} // 4, device="cuda")
a = torch.ones(4096, 4096, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while time.monotonic() < float(sys.argv[1]):
    (a @ a).sum().item()
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPUS, reason="nvidia-smi lists no GPU here"),
]


def probe(*names: str) -> dict[str, dict[str, object]]:
    command = [sys.executable, "-m", "hotswap.cli", "probe", "--json", "--deadline", "90", *names]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    print(done.stdout)
    assert done.stdout, done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)["probes"]}


@contextlib.contextmanager
def used(gpu: smi.Gpu, seconds: float = 240.0) -> Iterator[subprocess.Popen[str]]:
    """Somebody computes on *gpu* meanwhile."""
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(time.monotonic() + seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
    )
    try:
        assert user.stdout is not None and user.stdout.readline().strip() == "ready"
        yield user
    finally:
        user.kill()
        user.wait()


def settled() -> list[smi.Gpu]:
    """The GPUs once what ended before has given its memory back."""
    end = time.monotonic() + 30
    found = smi.gpus() or []
    while not all(gpu.idle for gpu in found) and time.monotonic() < end:
        time.sleep(0.2)
        found = smi.gpus() or []
    return found


def test_healthy_gpus_pass() -> None:
    assert all(gpu.idle for gpu in settled()), "somebody uses these GPUs"
    found = probe(*NAMES)
    for name in ("gpu_health", "gpu_compute", "gpu_memory"):
        assert found[name]["status"] == "passed", found[name]
    if len(GPUS) > 1:
        assert found["gpu_collective"]["status"] == "passed", found["gpu_collective"]
    assert found["fabric_manager"]["status"] in ("passed", "skipped"), found["fabric_manager"]
    assert all(float(str(one["seconds"])) < 60 for one in found.values())


def test_memory_stays_within_its_bound() -> None:
    settled()
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            most = max([most, *(gpu.used_bytes for gpu in smi.gpus() or [])])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = probe("gpu_memory")
    finally:
        done.set()
        watcher.join()
    assert found["gpu_memory"]["status"] == "passed", found
    print(f"at most {most >> 20} MiB were in use")
    assert 0 < most <= MEMORY_BYTES_MAX + CONTEXT_BYTES_MAX


def test_a_gpu_in_use_is_left_alone() -> None:
    gpus = settled()
    with used(gpus[0]):
        # Processes of others may be hidden in a container; what they take is not.
        assert not (smi.gpus() or [])[0].idle
        before = (smi.gpus() or [])[0].used_bytes
        peak, done = before, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.05):
                peak = max(peak, (smi.gpus() or gpus)[0].used_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            found = probe("gpu_compute", "gpu_memory", "gpu_collective")
        finally:
            done.set()
            watcher.join()
        assert peak <= before + (64 << 20), "a probe has been on it"
    for one in found.values():
        assert one["status"] in ("passed", "skipped"), one
        assert "use" in str(one["detail"]), one
    assert found["gpu_compute"]["status"] == ("passed" if len(gpus) > 1 else "skipped")
