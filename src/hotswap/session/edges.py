"""Where a session meets torch: the device it trains on, which errors speak of communication, and a bit to flip in a drill."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hotswap.errors import PeerFault
from hotswap.replication.capture import Capture

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


def flip_bit(state: Capture, part: str) -> None:
    """Change one bit of the largest tensor that peers hold as well and that has *part* in its name."""
    shared = [entry for adapter in state.adapters for _, entries in adapter.compared() for entry in entries]
    victim = max((entry for entry in shared if part in entry.name), key=lambda entry: entry.tensor.numel())
    first = torch.as_strided(victim.tensor.detach(), (1,), (1,), victim.tensor.storage_offset())
    first.view(torch.uint8)[0] ^= 1
