"""Probes of the GPUs: known results of computing, moving and remembering. Imported in the probe's own process alone.

A GPU that somebody uses is left alone: this process does not even see it. On the others a probe takes at most a quarter of the
free memory, and never more than 4 GiB (``MEMORY_BYTES_MAX``); ``gpu_compute`` and ``gpu_collective`` take less than 1 GiB.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from hotswap.diagnosis.probes import smi
from hotswap.diagnosis.probes.runner import Outcome, Status

SIZE = 1024
ROUNDS = 8
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
MEMORY_SHARE = 0.25
MEMORY_BYTES_MAX = 4 << 30
CHUNK_BYTES = 256 << 20
"""Patterns are compared piece by piece: the comparison needs memory of its own."""
COLLECTIVE_BYTES = 64 << 20
NONE = "there is no GPU that torch can use"
HEALTH = ("uuid", "ecc.errors.uncorrected.volatile.total", "remapped_rows.failure", "remapped_rows.pending")


def gpu_health() -> Outcome:
    """What the driver has counted: uncorrectable memory errors, and rows that could not be remapped. Touches no GPU."""
    rows = smi.query(HEALTH)
    if not rows:
        return Outcome(status=Status.SKIPPED, detail="there is no nvidia-smi that answers")
    return read_health(rows)


def read_health(rows: Sequence[Sequence[str]]) -> Outcome:
    """The outcome from rows of ``HEALTH``."""
    bad = []
    for uuid, uncorrected, failed, _ in rows:
        if smi.number(uncorrected):
            bad.append(f"{uuid}: {uncorrected} uncorrectable memory errors")
        if smi.number(failed) or failed == "Yes":
            bad.append(f"{uuid}: a row of memory could not be remapped")
    pending = sum(bool(smi.number(row[3])) or row[3] == "Yes" for row in rows)
    measured = {"gpus": float(len(rows)), "remap_pending_gpus": float(pending)}
    if bad:
        return Outcome(status=Status.FAILED, detail="; ".join(bad), measured=measured)
    return Outcome(status=Status.PASSED, detail=f"the driver blames none of {len(rows)} GPUs", measured=measured)


def gpu_compute() -> Outcome:
    """Multiplies matrices of small integers, whose product every correct GPU gives exactly, in 16 and 32 bits."""
    torch, outcome, left_out = _ready()
    if outcome is not None:
        return outcome
    # Else partial sums may be rounded to 16 bits, and the result would not be exact on a correct GPU either.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bad = []
    generator = torch.Generator().manual_seed(7)
    left = torch.randint(-3, 4, (SIZE, SIZE), generator=generator)
    right = torch.randint(-3, 4, (SIZE, SIZE), generator=generator)
    expected = (left.double() @ right.double()).to(torch.int32)
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        for kind in (torch.float32, torch.bfloat16):
            # Sums of at most 9216 are exact in the accumulator; the result in bfloat16 is rounded, so compare it rounded.
            a, b = left.to(device, kind), right.to(device, kind)
            want = expected.to(kind).to(torch.float32)
            if any(not torch.equal((a @ b).float().cpu(), want) for _ in range(ROUNDS)):
                bad.append(f"{device} in {kind}")
    if bad:
        return Outcome(status=Status.FAILED, detail=f"wrong product on {', '.join(bad)}")
    return _passed(f"{torch.cuda.device_count()} GPUs multiply correctly", left_out)


def gpu_memory() -> Outcome:
    """Fills part of the free memory of each GPU with patterns and reads them back."""
    torch, outcome, left_out = _ready()
    if outcome is not None:
        return outcome
    bad, total = [], 0
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        count = max(1, int(min(MEMORY_BYTES_MAX, MEMORY_SHARE * free)) // CHUNK_BYTES - 1)
        chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(count)]
        total += count * CHUNK_BYTES
        for pattern in PATTERNS:
            for chunk in chunks:
                chunk.fill_(pattern)
            # All are written before the first is read: what a wrong address overwrites must be seen.
            if not all(bool((chunk == pattern).all()) for chunk in chunks):
                bad.append(f"cuda:{index} pattern {pattern:#x}")
        del chunks
        torch.cuda.empty_cache()
    if bad:
        return Outcome(status=Status.FAILED, detail=f"memory returned other bytes: {', '.join(bad)}")
    detail = f"memory of {torch.cuda.device_count()} GPUs keeps its patterns"
    return _passed(detail, left_out, {"tested_bytes": float(total)})


def gpu_collective() -> Outcome:
    """Sums one tensor over all GPUs of the node with NCCL, which is what a dead fabric manager or NVLink breaks."""
    torch, outcome, left_out = _ready()
    if outcome is not None:
        return outcome
    count = torch.cuda.device_count()
    if count < 2:
        return Outcome(status=Status.SKIPPED, detail=f"there is only one GPU{left_out}")
    nccl: Any = importlib.import_module("torch.cuda.nccl")
    tensors = [torch.full((COLLECTIVE_BYTES // 4,), float(index + 1), device=f"cuda:{index}") for index in range(count)]
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    want, seconds = count * (count + 1) / 2, 0.0
    bad: set[int] = set()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        nccl.all_reduce(tensors, outputs)
        for index in range(count):
            torch.cuda.synchronize(index)
        seconds = time.perf_counter() - start
        bad.update(index for index, tensor in enumerate(outputs) if not bool((tensor == want).all()))
    if bad:
        return Outcome(status=Status.FAILED, detail=f"wrong sum on GPUs {sorted(bad)}")
    reach = [torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b]
    # Bytes that cross each GPU's links in a ring, over the time of the last round (the first ones connect).
    measured = {
        "bus_gb_per_s": round(2 * (count - 1) / count * COLLECTIVE_BYTES / seconds / 1e9, 1),
        "peer_share": sum(reach) / len(reach),
    }
    way = "directly" if all(reach) else "through the host, in part"
    return _passed(f"{count} GPUs sum correctly and reach each other {way}", left_out, measured)


def _passed(detail: str, left_out: str, measured: dict[str, float] | None = None) -> Outcome:
    return Outcome(status=Status.PASSED, detail=detail + left_out, measured=measured or {})


def _ready() -> tuple[Any, Outcome | None, str]:
    """torch with only the GPUs that nobody uses, or why there is nothing to do; and in words, which were left out."""
    found = smi.gpus()
    seen = smi.visible(found or ())
    idle = [gpu for gpu in seen if gpu.idle]
    if seen and not idle:
        return None, Outcome(status=Status.SKIPPED, detail=f"somebody uses the GPUs: {_users(seen)}"), ""
    if len(idle) < len(seen):
        # Before CUDA starts: a context on a GPU that is used would take memory from who uses it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in idle)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None, Outcome(status=Status.SKIPPED, detail="torch is not installed"), ""
    if not torch.cuda.is_available():
        return None, _without_cuda(seen, built=torch.version.cuda is not None), ""
    busy = [gpu for gpu in seen if not gpu.idle]
    return torch, None, f"; left alone, for they are used: {_users(busy)}" if busy else ""


def _users(found: Sequence[smi.Gpu]) -> str:
    return ", ".join(
        f"GPU {gpu.index} ({'pid ' + ' '.join(gpu.users) if gpu.users else f'{gpu.used_bytes >> 20} MiB'})"
        for gpu in found
    )


def _without_cuda(found: Sequence[smi.Gpu], *, built: bool) -> Outcome:
    """No GPU is no fault on a node without one; on a node with one it is, unless torch was built without CUDA."""
    if found and built:
        return Outcome(status=Status.FAILED, detail="the driver lists GPUs, but CUDA does not start")
    return Outcome(status=Status.SKIPPED, detail=NONE)
