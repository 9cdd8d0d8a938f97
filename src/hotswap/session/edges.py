"""Where a session meets torch: the device it trains on, and which errors speak of communication."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hotswap.errors import PeerFault

_COMM_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "process group", "ProcessGroup")


def own_gpu() -> torch.device | None:
    """The GPU that this worker trains on, made the current one; None where there is none or torch has no NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def looks_like_communication(error: BaseException) -> bool:
    """Whether a peer's failure may be behind it."""
    kinds = (PeerFault, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _COMM_WORDS)
    )
