"""Small training programs in plain torch, DDP, FSDP2 and HSDP, each step a function of the step's number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 24


class Boom(RuntimeError):
    """The failure that a test injects."""


class Faults:
    """Raises at the ``nth`` passage of a named point, once."""

    def __init__(self) -> None:
        self._point: str | None = None
        self._left = 0

    def arm(self, point: str | None, nth: int = 1) -> None:
        self._point, self._left = point, nth

    def pass_by(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left <= 0:
            self._point = None
            raise Boom(point)


def seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)


class Net(nn.Module):
    """Residual blocks with dropout and batch norm; one buffer is replaced, not written, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Dropout(0.2), nn.Linear(40, WIDTH)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(self.norm(x)))


class Loader:
    """Position in an endless stream; a Stateful."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
        return torch.randn(8, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class TorchProgram:
    """Two microbatches a step, gradient clipping, AdamW, a learning-rate schedule."""

    def __init__(self, kind: str, rank: int, world: int, start: int, *, dtype: str = "float32", **options: Any) -> None:
        seed(start)
        self.faults = Faults()
        self.kind = kind
        net = Net().to(getattr(torch, dtype))
        self.dtype = getattr(torch, dtype)
        self.model = _wrap(net, kind, world, options)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.loader = Loader(rank)
        self.extras = {
            "loader": self.loader,
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
        }
        block = net.blocks[1][1]
        block.register_forward_pre_hook(lambda *_: self.faults.pass_by("forward"))
        block.register_full_backward_pre_hook(lambda *_: self.faults.pass_by("backward"))
        seed(start + 17 * rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for last in (False, True):
            with self._accumulating(not last):
                loss = self.model(self.loader.next().to(self.dtype)).float().pow(2).mean()
                loss.backward()
        self.faults.pass_by("prestep")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.extras["scheduler"].step()

    @contextmanager
    def _accumulating(self, on: bool) -> Iterator[None]:
        if self.kind == "ddp" and on:
            with self.model.no_sync():
                yield
            return
        if self.kind in ("fsdp2", "hsdp"):
            # As training loops do it: a switch that an exception leaves where it is.
            self.model.set_requires_gradient_sync(not on)
        yield


def _wrap(net: Net, kind: str, world: int, options: dict[str, Any]) -> nn.Module:
    if kind == "plain":
        return net
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.004, init_sync=False, **options)
    mesh = _mesh(kind, world)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


@cache
def _mesh(kind: str, world: int) -> DeviceMesh:
    """One for all programs of a rank: a replacement must talk through the groups its peers use."""
    if kind == "fsdp2":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
