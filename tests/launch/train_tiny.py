"""The smallest protected training: one replicated layer. In its tenth step it waits until a file is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import hotswap

HELD_STEP = 10
assert "torch._dynamo" in sys.modules, "each worker would import it, which a recovery waits for"
steps, go = int(sys.argv[1]), Path(sys.argv[2])
session = hotswap.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters())
session.protect(model=model, optimizer=optimizer, total_steps=steps)
while session.step < steps:
    with session.attempt() as step:
        while step == HELD_STEP and not session.rehearsing and not go.exists():
            time.sleep(0.005)
        torch.manual_seed(step * session.world_size + session.slot)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if not session.rehearsing:
    print("finished at", session.step)
