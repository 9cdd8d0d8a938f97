"""torch's DistributedDataParallel: every slot of its group holds everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hotswap.errors import UsageError
from hotswap.integrations.modules import ModuleAdapter
from hotswap.integrations.pins import require_fields


class DDPAdapter(ModuleAdapter):
    """A DistributedDataParallel module with torch optimizers.

    How gradients are cut into buckets decides the order in which they are summed, and DDP cuts them anew after the
    first iteration. So the cut is part of the state: a replacement gets it from the snapshot, and the first boundary
    is where the new one is agreed on (DDP itself would do it at the start of the next forward).
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """UsageError unless each chunk is a DistributedDataParallel of the ordinary kind."""
        super().__init__(chunks, optimizers)
        self._wrappers = [_require_plain(chunk) for chunk in chunks]
        self._buckets = [_buckets(wrapper) for wrapper in self._wrappers]

    def _holders(self, parameter: torch.Tensor) -> tuple[int, ...]:
        ranks = dist.get_process_group_ranks(self._wrappers[0].process_group)
        return tuple(rank for rank in ranks if rank != dist.get_rank())

    def objects(self) -> dict[str, Any]:
        """Also the buckets. Collective at the boundary after the first iteration, when they change."""
        for index, wrapper in enumerate(self._wrappers):
            if wrapper.reducer._rebuild_buckets():
                wrapper._has_rebuilt_buckets = True
                self._buckets[index] = _buckets(wrapper)
        return {**super().objects(), "runtime": {"buckets": self._buckets}}

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put them back; a reducer with other buckets is replaced."""
        super().load_objects(tree)
        for index, (wrapper, buckets) in enumerate(zip(self._wrappers, tree["runtime"]["buckets"], strict=True)):
            if self._buckets[index] != buckets:
                _replace_reducer(wrapper, buckets)
                self._buckets[index] = buckets

    def begin_rehearsal(self) -> None:
        """Without reduction: a reducer needs a result, and detached groups have none.

        DDP prepares it after each forward; `no_sync` would do the same, but scripts that accumulate set that themselves.
        """
        for wrapper in self._wrappers:
            wrapper._post_forward = _as_it_is

    def reset(self) -> None:
        """Let the reducers forget an unfinished backward; the buckets stay."""
        super().reset()
        for wrapper in self._wrappers:
            wrapper.__dict__.pop("_post_forward", None)
            _forget_backward(wrapper)

    def obstacle(self) -> str | None:
        """None, if all slots hold the same model."""
        sizes = {dist.get_world_size(wrapper.process_group) for wrapper in self._wrappers}
        if sizes == {dist.get_world_size()}:
            return None
        return (
            "DistributedDataParallel joins only some of the slots, and nothing says how the rest of the model is shared out; leave "
            "--min-nodes out: then the job waits for a node and leaves with 75"
        )

    def synchronise(self) -> None:
        """Broadcast parameters and buffers, as the constructor does."""
        with torch.no_grad():
            for wrapper in self._wrappers:
                source = dist.get_global_rank(wrapper.process_group, 0)
                for tensor in _synchronised(wrapper):
                    dist.broadcast(tensor, src=source, group=wrapper.process_group)


def _as_it_is(output: Any) -> Any:
    return output


def _synchronised(wrapper: Any) -> Iterator[torch.Tensor]:
    ignored = wrapper.parameters_to_ignore
    for name, tensor in [*wrapper.module.named_parameters(), *wrapper.module.named_buffers()]:
        if name not in ignored:
            yield tensor.detach()


def _forget_backward(wrapper: Any) -> None:
    wrapper.reducer._reset_state()
    wrapper._has_rebuilt_buckets = False
    wrapper.require_forward_param_sync = True


def _require_plain(chunk: nn.Module) -> Any:
    if not isinstance(chunk, nn.parallel.DistributedDataParallel):
        raise UsageError(
            f"model is a {type(chunk).__qualname__} with DistributedDataParallel inside: pass the wrapped module itself"
        )
    wrapper: Any = chunk
    require_fields("torch", torch.__version__, "DistributedDataParallel", wrapper)
    require_fields("torch", torch.__version__, "Reducer", wrapper.reducer)
    if wrapper.static_graph:
        raise UsageError(
            "DistributedDataParallel(static_graph=True) cannot redo its first step: use static_graph=False"
        )
    if wrapper.mixed_precision is not None:
        raise UsageError("DistributedDataParallel(mixed_precision=...) is not supported: use torch.autocast")
    return wrapper


def _buckets(wrapper: Any) -> list[list[int]]:
    """Indices of the parameters in each bucket, in the order in which buckets are reduced."""
    index_of = {id(p): i for i, p in enumerate(_reduced(wrapper))}
    found = wrapper.reducer._get_zeros_like_grad_buckets()
    return [[index_of[id(p)] for p in bucket.parameters()] for bucket in found]


def _reduced(wrapper: Any) -> list[torch.Tensor]:
    parameters, _ = wrapper._build_params_for_reducer()
    return list(parameters)


def _replace_reducer(wrapper: Any, buckets: list[list[int]]) -> None:
    """Make a new reducer with the given buckets, through DDP's own helper so that its other options stay."""
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper.reducer._remove_autograd_hooks()
    limits = [wrapper.bucket_bytes_cap] * len(buckets)
    # The helper asks this function for the buckets and reverses what it returns.
    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", lambda *_: (buckets[::-1], limits)):
        wrapper._ddp_init_helper(parameters, expect_sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
