"""The smallest script that survives the loss of a node: FSDP2, a stateful loader, a scheduler.

hotswap run --standalone --nnodes 2:3 --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import hotswap

STEPS, BATCH, WIDTH = 200, 16, 64


class Loader:
    """Any loader will do whose position can be saved and loaded: torchdata's StatefulDataLoader, for example."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.position = 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.slot + self.position)
        self.position += 1
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        return inputs, inputs.roll(1, dims=1).tanh()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def main() -> None:
    session = hotswap.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = Loader(session.slot)
    session.protect(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, total_steps=STEPS)
    while session.step < STEPS:
        with session.attempt() as step:
            inputs, wanted = next(loader)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if session.slot == 0 and step % 20 == 0 and not session.rehearsing:
                print(f"step {step}  loss {float(loss.detach()):.4f}  generation {session.generation}", flush=True)


if __name__ == "__main__":
    main()
