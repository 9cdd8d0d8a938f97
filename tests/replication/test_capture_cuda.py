"""Capture of CUDA state; needs a device and says so where there is none."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hotswap.integrations import discover
from hotswap.replication.capture import Capture, pin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Program:
    def __init__(self, seed: int, layers: int = 4, width: int = 256, fused: bool = True) -> None:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)]
        self.model = nn.Sequential(*blocks, nn.BatchNorm1d(width), nn.Linear(width, 1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        self.width = width
        self.capture = Capture(discover(self.model, self.optimizer, scaler=self.scaler))

    def step(self, rows: int = 32) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(torch.randn(rows, self.width, device="cuda")).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@contextmanager
def pinned_memory(nbytes: int) -> Iterator[memoryview]:
    fd = os.memfd_create("snapshot")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    unpin = pin(memoryview(memory))
    try:
        yield memoryview(memory)
    finally:
        torch.cuda.synchronize()
        unpin()


@pytest.mark.parametrize("fused", [True, False])
def test_training_goes_on_from_any_snapshot_as_it_did(fused: bool) -> None:
    program, other = Program(1, fused=fused), Program(2, fused=fused)
    snapshots, digests = [], []
    for step in range(4):
        if step:
            program.step()
        buffer = bytearray(program.capture.nbytes())
        snapshots.append((buffer, *program.capture.write(buffer, slot=0, generation=1, step=step)))
        digests.append(program.capture.digest())
    assert len(set(digests)) == 4
    for target in (program, other):
        for step in (0, 2, 1):
            target.capture.read(*snapshots[step], slot=0, step=step, heavy=True)
            assert target.capture.digest() == digests[step]
            target.step()
            assert target.capture.digest() == digests[step + 1]


def test_an_asynchronous_snapshot_is_of_the_moment_it_was_begun() -> None:
    program = Program(1, layers=16, width=2048)
    program.step()
    digest = program.capture.digest()
    with pinned_memory(program.capture.nbytes() + 4096) as memory:
        sections = program.capture.write(memory, slot=0, generation=1, step=1, asynchronous=True)
        program.capture.fence()
        program.step()
        program.step()
        assert program.capture.copied is not None
        program.capture.copied.synchronize()
        program.capture.read(memory, *sections, slot=0, step=1, heavy=True)
        assert program.capture.digest() == digest


def test_pinned_memory_is_copied_to_at_bus_speed() -> None:
    program = Program(1, layers=24, width=4096)
    program.step()
    nbytes, best_s = program.capture.nbytes(), 1e9
    with pinned_memory(nbytes + 4096) as memory:
        for step in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            program.capture.write(memory, slot=0, generation=1, step=step)
            best_s = min(best_s, time.perf_counter() - began)
    print(f"{nbytes / 1e9:.2f} GB in {best_s * 1e3:.0f} ms: {nbytes / best_s / 1e9:.1f} GB/s")
    assert nbytes / best_s > 20e9, "no faster than pageable memory: pinning had no effect"
