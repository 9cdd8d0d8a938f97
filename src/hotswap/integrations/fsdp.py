"""fully_shard (FSDP2, HSDP) and other modules whose parameters are DTensors.

Placement decides who holds what: sharded along a mesh axis = unique along it, replicated = the same on all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from hotswap.errors import UsageError
from hotswap.integrations.base import place_of
from hotswap.integrations.modules import ModuleAdapter
from hotswap.integrations.pins import require_fields

_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


class ShardedAdapter(ModuleAdapter):
    """Modules with DTensor parameters and torch optimizers."""

    def __init__(self, chunks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """UsageError for placements that are not state (Partial)."""
        super().__init__(chunks, optimizers)
        self._fsdp = [m for chunk in self.chunks for m in chunk.modules() if isinstance(m, FSDPModule)]
        for state in self._fsdp_states():
            require_fields("torch", torch.__version__, "FSDPState", state)
            require_fields("torch", torch.__version__, "FSDPStateContext", state._state_ctx)
            for group in _param_groups(state):
                require_fields("torch", torch.__version__, "FSDPParamGroup", group)
                for param in group.fsdp_params:
                    require_fields("torch", torch.__version__, "FSDPParam", param)

    def _fsdp_states(self) -> list[Any]:
        states = {id(s): s for s in (m._get_fsdp_state() for m in self._fsdp)}
        return list(states.values())

    def _parameters(self, chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        # Between forward and backward a module's parameters may be the gathered ones; the state is the sharded ones.
        sharded = {
            id(param._unsharded_param): param.sharded_param
            for state in self._fsdp_states()
            for group in _param_groups(state)
            for param in group.fsdp_params
            if hasattr(param, "_unsharded_param")
        }
        for name, parameter in chunk.named_parameters():
            yield name, sharded.get(id(parameter), parameter)

    def _holders(self, parameter: torch.Tensor) -> tuple[int, ...]:
        if not isinstance(parameter, DTensor):
            return ()
        mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        if any(isinstance(placement, Partial) for placement in parameter.placements):
            raise UsageError("a parameter with a Partial placement is a pending sum, not state: redistribute it first")
        if coordinate is None:
            return ()
        index = tuple(
            slice(None) if isinstance(placement, Replicate) else place
            for placement, place in zip(parameter.placements, coordinate, strict=True)
        )
        ranks = mesh.mesh[index].reshape(-1).tolist()
        return tuple(rank for rank in ranks if rank != dist.get_rank())

    def _place(self) -> object:
        places = {p.device_mesh: None for _, p in self._all_parameters() if isinstance(p, DTensor)}
        return [(mesh.mesh.tolist(), mesh.get_coordinate()) for mesh in places]

    def obstacle(self) -> str | None:
        """None, if every slot has its part of each sharded parameter, and it is known which."""
        sharded = [parameter for _, parameter in self._all_parameters() if isinstance(parameter, DTensor)]
        if any(parameter.device_mesh.size() != dist.get_world_size() for parameter in sharded):
            why = "the device mesh of a parameter has only some of the slots, and nothing says how the rest of the model is shared out"
        elif any(place_of(parameter) is None for parameter in sharded):
            why = "the placements of a parameter do not tell which part of it is where"
        else:
            return None
        return f"{why}; leave --min-nodes out: then the job waits for a node and leaves with 75"

    def objects(self) -> dict[str, Any]:
        """Also the switches that gradient accumulation flips in the middle of a step."""
        flags = [
            [[getattr(group, flag) for flag in _FLAGS] for group in _param_groups(state)]
            for state in self._fsdp_states()
        ]
        last = [state._state_ctx.is_last_backward for state in self._fsdp_states()]
        return {**super().objects(), "runtime": {"flags": flags, "last": last}}

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put them back."""
        super().load_objects(tree)
        runtime = tree["runtime"]
        for state, flags, last in zip(self._fsdp_states(), runtime["flags"], runtime["last"], strict=True):
            state._state_ctx.is_last_backward = last
            for group, values in zip(_param_groups(state), flags, strict=True):
                for flag, value in zip(_FLAGS, values, strict=True):
                    setattr(group, flag, value)

    def reset(self) -> None:
        """Reshard everything and forget collectives in flight.

        torch's own reset_iter_state waits for them, which an aborted group does not allow.
        """
        for state in self._fsdp_states():
            _reset_state(state)
            for group in _param_groups(state):
                _reset_group(group)
        super().reset()


def _param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def _reset_state(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._training_state = TrainingState.IDLE
    for name in ("_modules_to_run_forward",):
        if hasattr(state, name):
            getattr(state, name).clear()
    context = state._state_ctx
    context.post_backward_final_callback_queued = False
    context.iter_forward_root = None
    context.is_last_backward = True
    comm = state._comm_ctx
    if not hasattr(comm, "post_forward_order"):
        return  # before the first forward there is nothing
    comm.post_forward_order.clear()
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    if hasattr(comm, "_last_post_reduce_events"):
        comm._last_post_reduce_events.clear()


def _reset_group(group: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    group._all_gather_result = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._all_reduce_state = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    group._to_sharded()
    for param in group.fsdp_params:
        param.sharded_param.grad = None
