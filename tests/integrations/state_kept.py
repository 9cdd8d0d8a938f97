"""What survivors would keep if reset forgot it: each entry saves a part of the state and returns how to put it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attributes(owners: Callable[[Any], list[Any]], *names: str) -> Callable[[Any], Callable[[], None]]:
    """Keep attributes of some objects of the program."""

    def save(program: Any) -> Callable[[], None]:
        saved = [(owner, name, _copy(getattr(owner, name))) for owner in owners(program) for name in names]

        def put_back() -> None:
            for owner, name, value in saved:
                setattr(owner, name, value)

        return put_back

    return save


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list, set) else value


def gradient_buffers(program: Any) -> Callable[[], None]:
    buffers = [buffer.grad_data for chunk in program.model for buffer in chunk.buffers]
    saved = [buffer.clone() for buffer in buffers]

    def put_back() -> None:
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)

    return put_back


def gradients(program: Any) -> Callable[[], None]:
    saved = [(p, p.grad) for p in program.model.parameters()]

    def put_back() -> None:
        for parameter, value in saved:
            parameter.grad = value

    return put_back


def reducer(program: Any) -> Callable[[], None]:
    """DDP's reducer has no readable state: the reset itself is taken out."""
    from hotswap.integrations import ddp

    ddp._forget_backward = lambda wrapper: None
    return lambda: None


def bucket_groups(program: Any) -> list[Any]:
    return [group for chunk in program.model for group in chunk.bucket_groups]


def fsdp_states(program: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [m._get_fsdp_state() for m in program.model.modules() if isinstance(m, FSDPModule)]


def fsdp_contexts(program: Any) -> list[Any]:
    return list({id(state._state_ctx): state._state_ctx for state in fsdp_states(program)}.values())


def fsdp_groups(program: Any) -> list[Any]:
    from hotswap.integrations.fsdp import _param_groups

    return [group for state in fsdp_states(program) for group in _param_groups(state)]


def fsdp_params(program: Any) -> list[Any]:
    return [param for group in fsdp_groups(program) for param in group.fsdp_params]


def checkpointing_flag(program: Any) -> list[Any]:
    from megatron.core.tensor_parallel import random

    return [random]


KEPT: dict[str, Callable[[Any], Callable[[], None]]] = {
    "reducer": reducer,
    "gradients": gradients,
    "gradient_buffers": gradient_buffers,
    "reduce_handle": attributes(bucket_groups, "grad_reduce_handle"),
    "gather_handle": attributes(bucket_groups, "param_gather_handle", "param_gather_dispatched"),
    "ready_counts": attributes(bucket_groups, "per_param_grad_ready_counts"),
    "first_batch": attributes(bucket_groups, "is_first_batch", "golden_per_param_grad_ready_counts"),
    "last_microbatch": attributes(bucket_groups, "is_last_microbatch"),
    "checkpointing": attributes(checkpointing_flag, "IS_CHECKPOINTING"),
    "fsdp_state": attributes(fsdp_states, "_training_state"),
    "fsdp_group": attributes(fsdp_groups, "_training_state"),
    "fsdp_root": attributes(fsdp_contexts, "iter_forward_root"),
    "fsdp_callback": attributes(fsdp_contexts, "post_backward_final_callback_queued"),
    "fsdp_gather": attributes(fsdp_groups, "_all_gather_result"),
    "fsdp_accumulated": attributes(fsdp_params, "unsharded_accumulated_grad"),
    "fsdp_partial": attributes(fsdp_groups, "_partial_reduce_output"),
    "fsdp_order": attributes(fsdp_groups, "_post_forward_indices"),
}
