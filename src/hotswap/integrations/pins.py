"""Private fields of frameworks that hotswap touches, by version range; checked when a model is discovered.

A field that has gone means that the framework works in another way than what was tested, and then exact recovery is
not certain: refuse at the start, by name, not in the middle of a recovery.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Fields of one class, for versions ``first <= v < end``."""

    framework: str
    first: tuple[int, int]
    end: tuple[int, int]
    owner: str
    fields: tuple[str, ...]


def _megatron(owner: str, *fields: str) -> Pin:
    return Pin(framework="megatron-core", first=(0, 16), end=(0, 20), owner=owner, fields=fields)


def _torch(owner: str, *fields: str) -> Pin:
    return Pin(framework="torch", first=(2, 11), end=(2, 15), owner=owner, fields=fields)


PINS: tuple[Pin, ...] = (
    _megatron(
        "DistributedDataParallel",
        "buffers",
        "bucket_groups",
        "expert_parallel_bucket_groups",
        "param_to_bucket_group",
        "ddp_config",
        "config",
        "dp_cp_group",
        "expt_dp_group",
        "tp_group",
        "pp_group",
        "ep_group",
        "zero_grad_buffer",
        "start_param_sync",
    ),
    _megatron(
        "_ParamAndGradBucketGroup",
        "grad_reduce_handle",
        "param_gather_handle",
        "param_gather_dispatched",
        "per_param_grad_ready_counts",
        "golden_per_param_grad_ready_counts",
        "is_first_batch",
        "is_last_microbatch",
    ),
    _megatron(
        "optimizer.DistributedOptimizer",
        "_copy_main_params_to_model_params",
        "_get_model_param_range_map",
        "model_param_gbuf_map",
    ),
    _megatron(
        "optimizer.Float16OptimizerWithFloat16Params",
        "_copy_main_params_to_model_params",
        "float16_groups",
        "fp32_from_float16_groups",
    ),
    _megatron("optimizer.FP32Optimizer", "optimizer"),
    _torch("DistributedDataParallel", "reducer", "process_group", "_has_rebuilt_buckets", "_post_forward"),
    _torch(
        "DistributedDataParallel",
        "_build_params_for_reducer",
        "_build_debug_param_to_name_mapping",
        "_ddp_init_helper",
        "parameters_to_ignore",
        "require_forward_param_sync",
    ),
    _torch("Reducer", "_reset_state", "_rebuild_buckets", "_get_zeros_like_grad_buckets", "_remove_autograd_hooks"),
    _torch("FSDPState", "_training_state", "_state_ctx", "_comm_ctx"),
    _torch("FSDPStateContext", "iter_forward_root", "post_backward_final_callback_queued", "is_last_backward"),
    _torch(
        "FSDPParamGroup",
        "_all_gather_result",
        "_post_reduce_event",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
        "_all_reduce_state",
        "_post_forward_indices",
        "_training_state",
        "_to_sharded",
        "fsdp_params",
    ),
    _torch("FSDPParam", "sharded_param", "unsharded_accumulated_grad"),
)


def require_fields(framework: str, version: str, owner: str, target: object) -> None:
    """UsageError unless this version is a tested one and ``target`` has the fields pinned for ``owner``."""
    number = _number(version)
    pins = [pin for pin in PINS if (pin.framework, pin.owner) == (framework, owner)]
    matching = [pin for pin in pins if pin.first <= number < pin.end]
    if not matching:
        ranges = ", ".join(f"{_text(pin.first)} to below {_text(pin.end)}" for pin in pins)
        raise UsageError(f"{framework} {version} is not supported ({owner}): install a version from {ranges or 'none'}")
    missing = [field for pin in matching for field in pin.fields if not hasattr(target, field)]
    if missing:
        raise UsageError(
            f"{framework} {version}: {type(target).__qualname__} has no {', '.join(missing)}, which exact recovery relies "
            f"on; install a release of {framework} that hotswap was tested with"
        )


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
