"""The same session for a script that was not started by ``hotswap run``: ordinary torch.distributed, no protection."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hotswap.errors import UsageError
from hotswap.integrations import discover
from hotswap.replication.capture import Capture
from hotswap.session.session import Session


class PlainSession(Session):
    """Counts steps and nothing else; the public attributes and methods are those of Session."""

    def __init__(self) -> None:
        """Initialise torch.distributed as torchrun's environment says."""
        warnings.warn("not started by 'hotswap run': training goes on unprotected", RuntimeWarning, stacklevel=3)
        if torch.cuda.is_available():
            dist.init_process_group("nccl")
        else:
            dist.init_process_group("gloo")
        self.slot = dist.get_rank()
        self.world_size = self.full_world_size = dist.get_world_size()
        self._step = 0
        self.generation = 0
        self.rehearsing = False
        self._capture = None
        self._in_attempt = False

    @property
    def step(self) -> int:
        """Updates done so far."""
        return self._step

    def protect(
        self,
        *,
        model: Any,
        optimizer: Any,
        loader: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        total_steps: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """As Session.protect: refuses what could not be protected, so that the script is known to be fit for it."""
        if self._capture is not None:
            raise UsageError("protect was called twice; call it once, after model and optimizer are built")
        stateful = {"loader": loader, "scheduler": scheduler, "scaler": scaler, **(extra or {})}
        self._capture = Capture(
            discover(model, optimizer, **{name: value for name, value in stateful.items() if value is not None})
        )

    @contextlib.contextmanager
    def attempt(self) -> Iterator[int]:  # type: ignore[override]
        """One step; every exception is the script's."""
        self._state()
        if self._in_attempt:
            raise UsageError("attempts do not nest")
        self._in_attempt = True
        try:
            yield self._step
        finally:
            self._in_attempt = False
        self._step += 1
