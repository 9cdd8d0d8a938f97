"""Probes of the GPUs: known results of computing, moving and remembering. Imported in the probe's own process alone.

A GPU that another process computes on is left alone: the probe is skipped, for it must not disturb a running job.
"""

from __future__ import annotations

import importlib
import subprocess
from typing import Any

from hotswap.diagnosis.probes.runner import Outcome, Status

SIZE = 1024
ROUNDS = 8
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
MEMORY_SHARE = 0.25
MEMORY_BYTES_MAX = 4 << 30
NONE = "there is no GPU that torch can use"


def gpu_compute() -> Outcome:
    """Multiplies matrices of small integers, whose product every correct GPU gives exactly, in 16 and 32 bits."""
    torch, outcome = _ready()
    if outcome is not None:
        return outcome
    # Else partial sums may be rounded to 16 bits, and the result would not be exact on a correct GPU either.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bad = []
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        generator = torch.Generator().manual_seed(7)
        left = torch.randint(-3, 4, (SIZE, SIZE), generator=generator)
        right = torch.randint(-3, 4, (SIZE, SIZE), generator=generator)
        expected = (left.double() @ right.double()).to(torch.int32)
        for kind in (torch.float32, torch.bfloat16):
            # Sums of at most 9216 are exact in the accumulator; the result in bfloat16 is rounded, so compare it rounded.
            a, b = left.to(device, kind), right.to(device, kind)
            want = expected.to(kind).to(torch.float32)
            if any(not torch.equal((a @ b).float().cpu(), want) for _ in range(ROUNDS)):
                bad.append(f"{device} in {kind}")
    if bad:
        return Outcome(status=Status.FAILED, detail=f"wrong product on {', '.join(bad)}")
    return Outcome(status=Status.PASSED, detail=f"{torch.cuda.device_count()} GPUs multiply correctly")


def gpu_memory() -> Outcome:
    """Fills part of the free memory of each GPU with patterns and reads them back."""
    torch, outcome = _ready()
    if outcome is not None:
        return outcome
    bad = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        buffer = torch.empty(int(min(MEMORY_BYTES_MAX, MEMORY_SHARE * free)), dtype=torch.uint8, device=f"cuda:{index}")
        for pattern in PATTERNS:
            buffer.fill_(pattern)
            if not bool((buffer == pattern).all()):
                bad.append(f"cuda:{index} pattern {pattern:#x}")
        del buffer
        torch.cuda.empty_cache()
    if bad:
        return Outcome(status=Status.FAILED, detail=f"memory returned other bytes: {', '.join(bad)}")
    return Outcome(status=Status.PASSED, detail=f"memory of {torch.cuda.device_count()} GPUs keeps its patterns")


def gpu_collective() -> Outcome:
    """Sums one tensor over all GPUs of the node with NCCL, which is what a dead fabric manager breaks."""
    torch, outcome = _ready()
    if outcome is not None:
        return outcome
    count = torch.cuda.device_count()
    if count < 2:
        return Outcome(status=Status.SKIPPED, detail="there is only one GPU")
    nccl: Any = importlib.import_module("torch.cuda.nccl")
    tensors = [torch.full((1 << 22,), float(index + 1), device=f"cuda:{index}") for index in range(count)]
    nccl.all_reduce(tensors)
    for index in range(count):
        torch.cuda.synchronize(index)
    want = count * (count + 1) / 2
    bad = [index for index, tensor in enumerate(tensors) if not bool((tensor == want).all())]
    if bad:
        return Outcome(status=Status.FAILED, detail=f"wrong sum on GPUs {bad}")
    return Outcome(status=Status.PASSED, detail=f"{count} GPUs sum correctly over NVLink or PCIe")


def _ready() -> tuple[Any, Outcome | None]:
    """torch, or why there is nothing to do."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None, Outcome(status=Status.SKIPPED, detail="torch is not installed")
    if not torch.cuda.is_available():
        return None, _without_cuda()
    if busy := _busy():
        return None, Outcome(status=Status.SKIPPED, detail=f"a job computes on the GPUs: {busy}")
    return torch, None


def _without_cuda() -> Outcome:
    """No GPU is no fault on a node without one; on a node with one it is."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Outcome(status=Status.SKIPPED, detail=NONE)
    if "GPU " in answer.stdout:
        return Outcome(status=Status.FAILED, detail="the driver lists GPUs, but CUDA does not start")
    return Outcome(status=Status.SKIPPED, detail=NONE)


def _busy() -> str:
    """Processes that compute on a GPU of this node, this one excepted; empty if there are none."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(sorted({line.strip() for line in answer.stdout.splitlines() if line.strip().isdigit()}))
