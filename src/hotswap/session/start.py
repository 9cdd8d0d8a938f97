"""The beginning of every script: a session under ``hotswap run``, or one that only counts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hotswap.errors import UsageError
from hotswap.session.plain import PlainSession
from hotswap.session.session import Session
from hotswap.session.settings import adopted


def init() -> Session:
    """Start this worker's session, and ``torch.distributed`` with it.

    Under ``hotswap run`` every group is stable across swaps. Started by anything else, the script trains unprotected with
    the ordinary backend for its device, so that one script serves both. UsageError if torch.distributed is already up.
    """
    if dist.is_initialized():
        raise UsageError("torch.distributed is already initialised; call hotswap.init() instead of init_process_group")
    settings = adopted()
    if settings is None:
        return PlainSession()
    # OpenMP allows a list, one number for each level of nesting.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]))
    return Session(settings)
