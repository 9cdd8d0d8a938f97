"""How long a main thread takes to park when its peer dies under NCCL, whatever it does just then.

Needs two CUDA devices: ``python -m pytest -m gpu tests/gpu/test_fence_on_gpus.py -s`` also prints, for each case, the time
from the begin of the fence until the main thread had parked, with groups that refuse and, for comparison, without. Of that,
the first 50 ms are the time that all slots get to come to a safe point. Where its threads stood meanwhile is printed as well.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_fleet import Fleet, SlotProcess
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hotswap.errors import Fenced, PeerUnreachable

WORLD = 2
ELEMENTS = 1 << 12
STEPS_BEFORE = 5
"""Of the victim, after which it dies."""
PARK_DEADLINE_S = 20.0
LAYERS = 8
SAMPLE_S = 0.01

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices, one for each slot"),
]

Step = Callable[[], object]


def small_operations(process: SlotProcess) -> Step:
    """Many operations that nobody waits for, until the device's queue is full."""
    tensor = torch.zeros(ELEMENTS, device=process.device)
    gathered = torch.empty(WORLD * ELEMENTS, device=process.device)

    def step() -> None:
        for _ in range(50):
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(gathered, tensor)

    return step


def waiting_for_the_device(process: SlotProcess) -> Step:
    """The abort frees a thread that waits for the device; the next operation is begun at once."""
    tensor = torch.zeros(ELEMENTS, device=process.device)

    def step() -> None:
        for _ in range(5):
            dist.all_reduce(tensor)
        tensor.sum().item()

    return step


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        reduced = gradient.contiguous()  # that of a sum is one number, seen many times
        dist.all_reduce(reduced)
        return reduced


def in_backward(process: SlotProcess) -> Step:
    """Operations that the thread of autograd begins, as tensor parallel layers do."""

    def step() -> None:
        value = torch.zeros(ELEMENTS, device=process.device, requires_grad=True)
        out = value
        for _ in range(50):
            out = _Reduced.apply(out)  # type: ignore[no-untyped-call]
        out.sum().backward()

    return step


def neighbours(process: SlotProcess) -> Step:
    """Brackets of point-to-point operations, one of which must not stay open."""
    sent, received = torch.zeros(ELEMENTS, device=process.device), torch.empty(ELEMENTS, device=process.device)
    peer = 1 - process.slot

    def step() -> None:
        for _ in range(20):
            both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()  # makes the stream wait, not this thread

    return step


def fsdp2(process: SlotProcess) -> Step:
    """Forward and backward of a sharded model, the loss looked at after each."""
    model = nn.Sequential(*(nn.Linear(512, 512, device=process.device) for _ in range(LAYERS)))
    mesh = init_device_mesh("cuda", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = torch.ones(64, 512, device=process.device)

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        loss.item()

    return step


def ddp(process: SlotProcess) -> Step:
    """Its reducer begins operations in C++, where nothing refuses: shows what that costs."""
    model = nn.Sequential(*(nn.Linear(512, 512, device=process.device) for _ in range(LAYERS)))
    replicated = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    batch = torch.ones(64, 512, device=process.device)

    def step() -> None:
        loss = replicated(batch).square().mean()
        loss.backward()
        loss.item()

    return step


class Sampler(threading.Thread):
    """Looks where all other threads are, from the begin of the fence until the main thread has parked."""

    def __init__(self, process: SlotProcess, parked: threading.Event) -> None:
        super().__init__(daemon=True)
        self._stop_flag, self._parked = process.groups._stop, parked
        self._seen: Counter[str] = Counter()
        self.start()

    def run(self) -> None:
        self._stop_flag.wait()
        others = {thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()}
        while not self._parked.wait(SAMPLE_S):
            for ident, frame in sys._current_frames().items():
                if ident not in others:
                    code = frame.f_code
                    self._seen[f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"] += 1

    def where(self) -> dict[str, int]:
        """How often a thread was seen at the most frequent places; a sample each 10 ms."""
        return dict(self._seen.most_common(4))


@pytest.mark.parametrize("refusing", [True, False], ids=["refusing", "as-before"])
@pytest.mark.parametrize("case", [small_operations, waiting_for_the_device, in_backward, neighbours, fsdp2, ddp])
def test_the_main_thread_parks_and_a_spare_takes_the_place(case: Callable[[SlotProcess], Step], refusing: bool) -> None:
    def main(process: SlotProcess) -> Any:
        if not refusing:
            process.groups._refusal.begin = lambda groups: None  # type: ignore[method-assign]
        step = case(process)
        timing: dict[str, Any] = {}
        if process.spare:
            torch.ones(1, device=process.device).sum().item()
            process.values.get("fence/1", 60.0)
        else:
            process.groups.connect(1, process.values)
            step()
            torch.cuda.synchronize(process.device)
            process.barrier("connected")
            parked = threading.Event()
            sampler = Sampler(process, parked)
            watch = process.watch(1, parked, deadline_s=PARK_DEADLINE_S)
            timing = _run_until_stopped(process, step)
            report = watch.park()
            assert report.parked, report
            timing |= {"parked_ms": round(report.ms, 1), "seen_in": sampler.where()}
            process.groups.detach()
        timing["connect_ms"] = round(process.groups.connect(2, process.values).ms, 1)
        sums = _use(process)
        process.groups.gate()
        began = time.monotonic()
        process.groups.retire().join()
        timing["still_aborting_ms"] = round((time.monotonic() - began) * 1e3, 1)
        process.barrier("end")
        return [sums, timing]

    fleet = Fleet(WORLD, deadline_s=150.0, timeout_s=60.0, on_gpu=True)
    results = fleet.run(main, spare_for=frozenset({1}))
    assert results.pop(1) == "killed"
    kind = "refusing" if refusing else "as before"
    print("\n" + json.dumps({"case": case.__name__, "groups": kind, **results[0][1]}))
    assert results[0][0] == results["spare1"][0] == [float(WORLD * (WORLD + 1) // 2), 1.0, [2.0, 2.0]]


def _run_until_stopped(process: SlotProcess, step: Step) -> dict[str, Any]:
    try:
        for number in range(1_000_000):
            if process.slot == 1 and number == STEPS_BEFORE:
                process.die()
            step()
    except (Fenced, PeerUnreachable, RuntimeError) as error:
        return {"stopped_by": type(error).__name__, "steps": number}
    raise AssertionError("nothing stopped the main thread")


def _use(process: SlotProcess) -> list[Any]:
    """One of each kind in the new generation: exact sums, and point-to-point both ways."""
    total = torch.full((ELEMENTS,), float(process.slot + 1), device=process.device)
    dist.all_reduce(total)
    peer = 1 - process.slot
    sent, received = torch.ones(1, device=process.device), torch.empty(1, device=process.device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    gathered = torch.empty(WORLD, device=process.device)
    dist.all_gather_into_tensor(gathered, 2 * torch.ones(1, device=process.device))
    return [float(total[-1]), float(received[0]), gathered.tolist()]
