"""Which adapters a training program needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hotswap.errors import UsageError
from hotswap.integrations.ambient import RandomAdapter
from hotswap.integrations.base import StateAdapter
from hotswap.integrations.ddp import DDPAdapter
from hotswap.integrations.fsdp import ShardedAdapter
from hotswap.integrations.megatron import MegatronAdapter, is_megatron
from hotswap.integrations.modules import ModuleAdapter
from hotswap.integrations.stateful import StatefulAdapter


def discover(model: Any, optimizer: Any, **extras: Any) -> list[StateAdapter]:
    """Return the adapters for a model (or the list of its pipeline chunks), its optimizer (or several) and extras.

    ``extras`` are objects with ``state_dict`` and ``load_state_dict``. The random generators come last, because
    restoring anything else may draw from them. UsageError, saying what to do, for what cannot be restored exactly.
    """
    chunks = _chunks(model)
    adapters: list[StateAdapter] = [_model_adapter(chunks, optimizer)]
    for name, target in extras.items():
        if name in ("model", "random"):
            raise UsageError(f"the name {name!r} is taken: protect this object under another one")
        adapters.append(StatefulAdapter(name, target))
    adapters.append(RandomAdapter())
    return adapters


def _chunks(model: Any) -> list[nn.Module]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise UsageError(f"model is a {type(chunk).__qualname__}: pass the torch module, or the list of its chunks")
        for module in chunk.modules():
            _refuse_unsupported(module)
    if not chunks:
        raise UsageError("model has no chunks: pass the torch module, or the list of its chunks")
    return [getattr(chunk, "_orig_mod", chunk) for chunk in chunks]


def _refuse_unsupported(module: nn.Module) -> None:
    if isinstance(module, FullyShardedDataParallel):
        raise UsageError("FullyShardedDataParallel (FSDP1) is not supported: use fully_shard (FSDP2)")
    if isinstance(module, nn.DataParallel):
        raise UsageError("nn.DataParallel is not supported: use DistributedDataParallel or fully_shard")
    if type(module).__name__ == "MegatronFSDP":
        raise UsageError("Megatron-FSDP is not supported: use Megatron-Core's DistributedDataParallel")


def _model_adapter(chunks: Sequence[nn.Module], optimizer: Any) -> StateAdapter:
    if any(is_megatron(chunk) for chunk in chunks) or _is_megatron_optimizer(optimizer):
        return MegatronAdapter(chunks, optimizer)
    optimizers = _torch_optimizers(optimizer)
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for chunk in chunks for m in chunk.modules()):
        return DDPAdapter(chunks, optimizers)
    if any(isinstance(m, FSDPModule) for chunk in chunks for m in chunk.modules()) or any(
        isinstance(p, DTensor) for chunk in chunks for p in chunk.parameters()
    ):
        return ShardedAdapter(chunks, optimizers)
    return ModuleAdapter(chunks, optimizers)


def _is_megatron_optimizer(optimizer: Any) -> bool:
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return module is not None and isinstance(optimizer, module.MegatronOptimizer)


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for inner in optimizers:
        # By name: importing it costs time and warns.
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(inner).__mro__):
            raise UsageError(
                "ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard optimizer state"
            )
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is a {type(inner).__qualname__}: pass a torch.optim optimizer or a list of them"
            )
    return optimizers
