"""One seed for every generator a program might draw from, so that two runs are comparable."""

from __future__ import annotations

import os
import random

import numpy
import torch

from hotswap.node import gpus


def has_gpus() -> bool:
    """Whether a worker here trains on a GPU. Does not wake the driver: a fork server asks too."""
    return torch.version.cuda is not None and bool(gpus.visible())


def training_device() -> torch.device:
    """This worker's GPU, which ``hotswap.init`` has made the current one, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpus() else torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators. A forked worker starts with its parent's state otherwise."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if has_gpus():
        # Two runs can only be equal to the last bit if each kernel is.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
