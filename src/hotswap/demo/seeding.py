"""One seed for every generator a program might draw from, so that two runs are comparable."""

from __future__ import annotations

import random

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators. A forked worker starts with its parent's state otherwise."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
