"""Where in a step a worker can be made to die. Nothing is installed unless a fault is ordered (see hotswap.session.faults)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotswap.session import faults
from hotswap.session.faults import fault_point


def place_in_torch(model: nn.Module, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Moments of an FSDP2 or DDP step; after ``protect``, so that the commit gate comes before the optimizer's moment."""
    if not faults.armed():
        return
    first, middle = blocks[0], blocks[len(blocks) // 2]
    first.register_forward_pre_hook(_in_training("gather"), prepend=True)
    middle.register_forward_pre_hook(_in_training("forward"))
    middle.register_full_backward_pre_hook(_in_training("backward"))
    # Backward reaches the first block last: the gradients of the others are on their way.
    first.register_full_backward_pre_hook(_in_training("reduce"))
    optimizer.register_step_pre_hook(lambda *_: fault_point("optimizer"))


def place_in_megatron(model: Any, layers: Sequence[nn.Module], optimizer: Any) -> None:
    """Moments of a Megatron-Core step; after ``protect``."""
    if not faults.armed():
        return
    layers[0].register_forward_pre_hook(_in_training("forward"))
    layers[0].register_full_backward_pre_hook(_in_training("backward"))
    model.finish_grad_sync = _first("reduce", model.finish_grad_sync)
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        member.optimizer.register_step_pre_hook(lambda *_: fault_point("optimizer"))
    # With overlap this is the next forward's gather, without it the one at the end of optimizer.step().
    for group in model.bucket_groups:
        group.start_param_sync = _first("gather", group.start_param_sync)


def _in_training(moment: str) -> Callable[..., None]:
    def hook(module: nn.Module, *_: object) -> None:
        if module.training:
            fault_point(moment)

    return hook


def _first(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fault_point(moment)
        return function(*args, **kwargs)

    return wrapped
