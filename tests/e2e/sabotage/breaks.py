"""Mechanisms broken on purpose. A test that passes with its mechanism broken would prove nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


# --- in workers ----------------------------------------------------------------------------------------------------------


def random_states() -> None:
    """What a begun attempt has drawn from random generators is not taken back."""
    from hotswap.integrations.ambient import RandomAdapter

    RandomAdapter.load_objects = _nothing  # type: ignore[method-assign]


def reset() -> None:
    """Handles and counters that an interrupted attempt has left in the framework stay."""
    from hotswap.integrations.megatron import MegatronAdapter

    MegatronAdapter.reset = _nothing  # type: ignore[method-assign]


def undo() -> None:
    """Survivors that have begun to update stay as they are."""
    from hotswap.session.snapshots import Snapshots

    read = Snapshots.read
    Snapshots.read = lambda self, load, *, heavy: read(self, load, heavy=False)  # type: ignore[method-assign]


def gate() -> None:
    """Workers update without knowing whether the state before is in two places everywhere."""
    from hotswap.session.session import Session

    Session._pass_gate = _nothing  # type: ignore[method-assign]


def abort() -> None:
    """Nobody shuts the connections of a generation that has ended, nor wakes who waits on them."""
    from hotswap.comm.groups import Groups

    Groups._shut = lambda self, links, keys: frozenset()  # type: ignore[assignment, method-assign]


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


def slow_replicas() -> None:
    """No break, but what makes a broken gate show: replicas arrive long after the next steps could have been done."""
    from hotswap.node.memory_keeper import MemoryKeeper

    push = MemoryKeeper._push

    def slowly(self: MemoryKeeper, *args: Any) -> None:
        time.sleep(1.0)
        push(self, *args)

    MemoryKeeper._push = slowly  # type: ignore[method-assign]


IN_WORKERS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (random_states, reset, undo, gate, abort, one_bit)
}
IN_AGENTS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (replication_again, slow_replicas)
}
