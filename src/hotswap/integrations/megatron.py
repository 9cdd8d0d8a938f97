"""Megatron-Core: its DistributedDataParallel with a (chained) distributed, float-16 or fp32 optimizer.

With the distributed optimizer the fp32 main shards and the moments exist once; model parameters are the all-gather of
them and need no copy. With the other optimizers everything is the same on the whole data-parallel group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hotswap.errors import UsageError
from hotswap.integrations.base import TensorEntry, local
from hotswap.integrations.modules import ModuleAdapter
from hotswap.integrations.pins import require_fields

_CALCULATOR_MODULE = "megatron.core.num_microbatches_calculator"
_CALCULATOR_FIELDS = ("num_micro_batches", "current_global_batch_size", "current_running_global_batch_size")


class MegatronAdapter(ModuleAdapter):
    """All model chunks of one pipeline stage and their optimizer."""

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any) -> None:
        """``optimizer``: what ``get_megatron_optimizer`` returned. UsageError for what cannot be restored exactly."""
        members = list(getattr(optimizer, "chained_optimizers", None) or [optimizer])
        self._outer = optimizer
        self._active = [o for o in members if o.optimizer is not None and not getattr(o, "is_stub_optimizer", False)]
        self._members = members
        self._distributed = [o for o in self._active if type(o).__name__ == "DistributedOptimizer"]
        _refuse_unsupported(chunks, members)
        super().__init__(chunks, [o.optimizer for o in self._active])
        self._wrapped = cast("list[Any]", self.chunks)
        self._frozen = {id(p) for c in self._wrapped for p in c.parameters() if p not in c.param_to_bucket_group}
        self._main_of = {id(main): model for main, model in self._main_and_model()}
        self._sync_functions = [(c.config.grad_sync_func, c.config.param_sync_func) for c in self._wrapped]

    # --- who has what ---------------------------------------------------------------------------------------------

    def _main_and_model(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for member in self._active:
            if member in self._distributed or not hasattr(member, "float16_groups"):
                continue
            for models, mains in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
                yield from zip(mains, models, strict=True)

    def _derived(self) -> set[int]:
        if self._distributed:
            return {id(p) for chunk in self._wrapped for p in chunk.param_to_bucket_group}
        return {id(model) for _, model in self._main_and_model()}

    def _holders(self, parameter: torch.Tensor) -> tuple[int, ...]:
        chunk: Any = self.chunks[0]
        if self._distributed and id(parameter) not in self._frozen:
            if chunk.ddp_config.num_distributed_optimizer_instances == 1:
                return ()
            group = chunk.inter_dist_opt_group
        else:
            model = self._main_of.get(id(parameter), parameter)
            group = _data_parallel_group(chunk, model)
        return tuple(rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())

    def compared(self) -> list[tuple[tuple[int, ...], list[TensorEntry]]]:
        """Also the model parameters, which the whole data-parallel group has gathered, or made from equal main parameters."""
        derived = self._derived()
        found: dict[tuple[int, ...], list[TensorEntry]] = {}
        for peers, entries in super().compared():
            found.setdefault(peers, []).extend(entries)
        for index, chunk in enumerate(self._wrapped):
            for name, parameter in chunk.named_parameters():
                if id(parameter) in derived:
                    ranks = dist.get_process_group_ranks(_data_parallel_group(chunk, parameter))
                    peers = tuple(rank for rank in ranks if rank != dist.get_rank())
                    entry = TensorEntry(name=f"model.{index}.{name}", tensor=local(parameter), shared=True)
                    found.setdefault(peers, []).append(entry)
        return [(peers, entries) for peers, entries in found.items() if peers]

    def obstacle(self) -> str | None:
        """Shards of the distributed optimizer are cut from flat buckets, whose size depends on the number of slots."""
        return (
            "what a slot holds of a Megatron-Core model and its optimizer depends on how many there are; leave --min-nodes out: then the "
            "job waits for a node and leaves with 75. To go on with fewer, save with Megatron-Core's own distributed checkpoints, "
            "which load into any layout, and start anew from there"
        )

    def _place(self) -> object:
        chunk: Any = self.chunks[0]
        groups = (chunk.tp_group, chunk.pp_group, chunk.ep_group, chunk.dp_cp_group, chunk.expt_dp_group)
        ranks = [(g.rank(), g.size()) for group in groups for g in (group if isinstance(group, list) else [group])]
        return ranks, [type(o).__name__ for o in self._members]

    def _part(self) -> object:
        chunk: Any = self.chunks[0]
        return [
            group.rank() for group in (chunk.tp_group, chunk.pp_group, chunk.ep_group) if not isinstance(group, list)
        ]

    # --- objects --------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Also the loss scaler and the ramp-up of the number of microbatches."""
        tree = super().objects()
        tree["scalers"] = [scaler.state_dict() for scaler in self._scalers()]
        calculator = _calculator()
        tree["microbatches"] = {f: getattr(calculator, f) for f in _CALCULATOR_FIELDS if hasattr(calculator, f)}
        return tree

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put them back."""
        super().load_objects(tree)
        for scaler, saved in zip(self._scalers(), tree["scalers"], strict=True):
            scaler.load_state_dict(saved)
        for field, value in tree["microbatches"].items():
            setattr(_calculator(), field, value)

    def _scalers(self) -> list[Any]:
        found = {id(s): s for s in (getattr(o, "grad_scaler", None) for o in self._active) if s is not None}
        return list(found.values())

    # --- after a failure ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Bring bucket groups, gradients, schedules and one-time caches to where a new process has them.

        Survivors must act as in their first iteration, because a replacement does: otherwise the order in which
        collectives are issued differs and the job deadlocks.
        """
        for chunk, functions in zip(self._wrapped, self._sync_functions, strict=True):
            for group in _bucket_groups(chunk):
                _reset_bucket_group(group)
            chunk.zero_grad_buffer()
            # A forward-only schedule sets these aside and an exception keeps it from putting them back.
            chunk.config.grad_sync_func, chunk.config.param_sync_func = functions
            _stop_timers(chunk.config.timers)
        for member in [self._outer, *self._members]:
            # 0.17 and later all-reduce once to find this out; a replacement has not, so nobody may remember.
            if hasattr(member, "_has_grad_norm_group_cache"):
                member._has_grad_norm_group_cache = None
        # An exception inside of activation checkpointing leaves the flag up.
        sys.modules["megatron.core.tensor_parallel.random"]._unset_checkpointing()
        super().reset()

    def synchronise(self) -> None:
        """Do what constructors would have done on connected groups, as far as `materialise` does not.

        Frozen and replicated parameters become equal over the data-parallel group, and the copy of the word embeddings
        on the last pipeline stage, which is built as zeros, becomes that of the first.
        """
        derived = self._derived() if self._distributed else set()
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    if id(parameter) not in derived:
                        self._broadcast(chunk, parameter, parameter)
            for main, model in self._main_and_model():
                self._broadcast(self.chunks[0], model, main)
            for chunk in self.chunks:
                for module in chunk.modules():
                    if hasattr(module, "shared_embedding_or_output_weight"):
                        self._copy_embedding(module)

    def _broadcast(self, chunk: Any, model: torch.Tensor, target: torch.Tensor) -> None:
        group = _data_parallel_group(chunk, model)
        dist.broadcast(target.data, src=dist.get_global_rank(group, 0), group=group)

    def _copy_embedding(self, module: Any) -> None:
        """The condition is that of ``setup_embeddings_and_output_layer``, whose all-reduce this stands for."""
        shares = module.share_embeddings_and_output_weights or getattr(module.config, "mtp_num_layers", 0)
        if not shares or module.config.pipeline_model_parallel_size == 1 or not module._is_in_embd_group():
            return
        weight, group = module.shared_embedding_or_output_weight(), module.embd_group
        before = weight.detach().clone()
        dist.broadcast(weight.data, src=dist.get_global_rank(group, 0), group=group)
        # Only if it was another one: main parameters that a script has loaded are more exact than the model's.
        if not torch.equal(before, weight):
            self._refresh_main(weight)

    def _refresh_main(self, weight: Any) -> None:
        main = getattr(weight, "main_param", None)
        if main is None:
            return
        flat = weight.detach().view(-1)
        for member in self._distributed:
            if weight in member.model_param_gbuf_map:
                held = member._get_model_param_range_map(weight)["param"]
                flat = flat[held.start : held.end]
        main.data.copy_(flat.view(main.shape))

    def materialise(self) -> None:
        """Copy main to model parameters and gather them over the data-parallel group."""
        with torch.no_grad():
            for member in self._active:
                if hasattr(member, "_copy_main_params_to_model_params"):
                    member._copy_main_params_to_model_params()
            if self._distributed:
                for chunk in self._wrapped:
                    chunk.start_param_sync(force_sync=True)


def is_megatron(chunk: nn.Module) -> bool:
    """Whether ``chunk`` is wrapped by Megatron-Core's DistributedDataParallel."""
    module = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    return module is not None and isinstance(chunk, module.DistributedDataParallel)


def _data_parallel_group(chunk: Any, parameter: torch.Tensor) -> Any:
    """Experts have groups of their own."""
    return chunk.dp_cp_group if getattr(parameter, "allreduce", True) else chunk.expt_dp_group


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _reset_bucket_group(group: Any) -> None:
    group.grad_reduce_handle = None
    group.param_gather_handle = None
    group.param_gather_dispatched = False
    group.per_param_grad_ready_counts = {}
    group.golden_per_param_grad_ready_counts = {}
    group.is_first_batch = True
    # A schedule that dies inside no_sync() leaves it off.
    group.is_last_microbatch = True
    if hasattr(group, "grad_reduce_finished"):
        group.grad_reduce_finished = False


def _stop_timers(timers: Any) -> None:
    """A timer that was running when the attempt failed refuses to be started again."""
    for timer in getattr(timers, "_timers", {}).values():
        timer._started = False


def _calculator() -> Any:
    module = sys.modules.get(_CALCULATOR_MODULE)
    return getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)


def _refuse_unsupported(chunks: Sequence[nn.Module], members: Sequence[Any]) -> None:
    version = str(sys.modules["megatron.core"].__version__)
    for member in members:
        kind = type(member).__name__
        if kind not in ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"):
            raise UsageError(
                f"Megatron-Core's {kind} is not supported: use get_megatron_optimizer with adam or sgd and without "
                "layer-wise or offloaded optimizers"
            )
        if type(member.optimizer).__name__ == "HybridDeviceOptimizer":
            raise UsageError(
                "Megatron-Core's optimizer offload to CPU is not supported: switch optimizer_cpu_offload off"
            )
        require_fields("megatron-core", version, f"optimizer.{kind}", member)
    for chunk in chunks:
        if not is_megatron(chunk):
            raise UsageError(
                f"a model chunk is a {type(chunk).__qualname__}: with a Megatron-Core optimizer wrap every chunk in "
                "megatron.core.distributed.DistributedDataParallel (Megatron-FSDP is not supported)"
            )
        _refuse_unsupported_chunk(chunk, version)


def _refuse_unsupported_chunk(chunk: Any, version: str) -> None:
    require_fields("megatron-core", version, "DistributedDataParallel", chunk)
    for group in _bucket_groups(chunk):
        require_fields("megatron-core", version, "_ParamAndGradBucketGroup", group)
    if getattr(chunk.ddp_config, "nccl_ub", False) or getattr(chunk.config, "tp_comm_overlap", False):
        raise UsageError(
            "registered communication buffers (nccl_ub, tp_comm_overlap) belong to a communicator and do not survive "
            "its replacement: switch them off"
        )
    if getattr(chunk.config, "enable_cuda_graph", False) or getattr(chunk.config, "cuda_graph_impl", "none") != "none":
        raise UsageError("CUDA graphs hold pointers to communicators that are replaced: set cuda_graph_impl to 'none'")
    if getattr(chunk.config, "fp8", None) or getattr(chunk.config, "fp4", None):
        raise UsageError("fp8 and fp4 keep scaling state outside of the optimizer: train in bf16, fp16 or fp32")
