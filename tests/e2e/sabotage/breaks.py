"""Mechanisms broken on purpose. A test that passes with its mechanism broken would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


# --- in workers ----------------------------------------------------------------------------------------------------------


def random_states() -> None:
    """What a begun attempt has drawn from random generators is not taken back."""
    from hotswap.integrations.ambient import RandomAdapter

    RandomAdapter.load_objects = _nothing  # type: ignore[method-assign]


def undo() -> None:
    """Survivors that have begun to update stay as they are."""
    from hotswap.session.snapshots import Snapshots

    read = Snapshots.read
    Snapshots.read = lambda self, load, *, heavy: read(self, load, heavy=False)  # type: ignore[method-assign]


def one_bit() -> None:
    """A restore is wrong by one bit of one parameter of one slot."""
    import torch

    from hotswap.session.session import Session

    restore = Session._restore

    def nearly(self: Session, load: Any, capture: Any) -> None:
        restore(self, load, capture)
        if load.generation > 1 and self.slot == 2:
            parameter = capture.optimizers()[0].param_groups[0]["params"][0]
            local = getattr(parameter, "_local_tensor", parameter).detach().view(-1)
            local[:1].view(torch.int32).bitwise_xor_(1)

    Session._restore = nearly  # type: ignore[method-assign]


# --- in agents -----------------------------------------------------------------------------------------------------------


def replication_again() -> None:
    """After a recovery nobody looks whether the resume step is in two places again."""
    from hotswap.node.memory_keeper import MemoryKeeper

    MemoryKeeper.ensure_replicated = (  # type: ignore[method-assign]
        lambda self, slot, step, plan: self._ack(slot, plan.generation, step)
    )


IN_WORKERS: dict[str, Callable[[], None]] = {function.__name__: function for function in (random_states, undo, one_bit)}
IN_AGENTS: dict[str, Callable[[], None]] = {function.__name__: function for function in (replication_again,)}
