"""Run an unmodified Megatron-Core on CPU and gloo, for the demo and for tests.

`install` before the first import of ``megatron``, `patch_megatron` after it. Both change the process for good and are
idempotent. What Megatron asks of CUDA is answered with the CPU's equivalent or with something inert; the parallelism
(groups, schedules, buffers, optimizer) is the real one. Set in the model's configuration what has no CPU counterpart:
``use_cpu_initialization=True``, every fusion off, ``average_in_collective=False``, no gloo twins of groups.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_state: dict[str, Any] = {}


def install() -> None:
    """Redirect torch.cuda to the CPU. UsageError-free: harmless where no CUDA device is; do not call where one is."""
    if _state:
        return
    assert not torch.cuda.is_available(), "megatron_cpu.install() on a machine with CUDA would disable its devices"
    _stub_triton()
    _redirect_devices()
    _redirect_random()
    _redirect_streams()
    _redirect_tensor_methods()
    # Literal device="cuda" in schedules, grad scaler and optimizer: rewritten at the call, for the whole process.
    _state["mode"] = _CudaToCpu()
    _state["mode"].__enter__()


def patch_megatron() -> None:
    """Redirect Megatron's own two accessors of CUDA generators, which index torch.cuda's list of devices."""
    assert _state, "call install() before importing megatron, then patch_megatron()"
    module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    module._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


class _CudaToCpu(TorchFunctionMode):
    """Every call with ``device="cuda"`` or a device index gets the CPU instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class _Inert:
    """A stream or event that is always done."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_args: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


def _redirect_devices() -> None:
    """Buffers, gather outputs and pipeline receive buffers are allocated on ``torch.cuda.current_device()``."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = _nothing
    cuda._lazy_init = _nothing
    cuda.memory_allocated = lambda *_args, **_kwargs: 0
    cuda.max_memory_allocated = lambda *_args, **_kwargs: 0
    cuda.empty_cache = _nothing


def _redirect_random() -> None:
    """The random tracker swaps the CUDA generator's state in and out; here it is the CPU generator's."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = cuda.manual_seed
    # Deferred until CUDA is initialised, which never happens here.
    cuda._lazy_call = lambda function, **_kwargs: function()


def _redirect_streams() -> None:
    """Work on the CPU is done when the call returns: streams and events order nothing."""
    cuda: Any = torch.cuda
    stream = _Inert()
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.synchronize = _nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing


def _redirect_tensor_methods() -> None:
    """``.cuda()`` stays where it is; ``.type()`` says ``torch.cuda.*``, by which optimizers sort their parameters."""
    tensor: Any = torch.Tensor
    original = tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if args or kwargs or not isinstance(found, str) or found.startswith("torch.cuda."):
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.type = type_name


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


def _stub_triton() -> None:
    """Megatron-Core 0.17 and later import triton unconditionally; its kernels are never launched on the CPU."""
    # torch must look for triton, and conclude that there is none, before there is something by that name; and dynamo
    # lists torch's functions when it is imported, and refuses when several are the same one, as they are from here on.
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")
    if importlib.util.find_spec("triton") is not None:
        return
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__getattr__ = _stub_attribute  # type: ignore[method-assign]
    triton.__path__ = []
    triton.__dict__.update(__version__="3.9.0", language=language)
    sys.modules.update({"triton": triton, "triton.language": language})


def _stub_attribute(name: str) -> _Stub:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Stub()


class _Stub:
    """Whatever a module does with triton at import: decorators return the function, everything else another stub."""

    def __getattr__(self, name: str) -> _Stub:
        return _stub_attribute(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Stub()

    def __getitem__(self, key: object) -> _Stub:
        return _Stub()

    def __or__(self, other: object) -> _Stub:
        return self

    __ror__ = __or__
