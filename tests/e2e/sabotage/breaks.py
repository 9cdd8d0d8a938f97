"""Mechanisms broken on purpose. A test that passes with its mechanism broken would prove nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

SLOW_PUSH_S = 0.5


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


def abort() -> None:
    """Nothing frees a survivor that waits for a peer which will never answer."""
    from hotswap.comm import AbortReport, Groups

    def wait(self: Groups, *, parked: threading.Event, deadline_s: float, **_: Any) -> AbortReport:
        self._stop.set()
        return AbortReport(aborted=frozenset(), parked=parked.wait(deadline_s), roused=0, ms=0.0)

    Groups.abort = wait  # type: ignore[method-assign]


def reset() -> None:
    """What a failed attempt leaves in a framework stays there."""
    from hotswap.integrations.ddp import DDPAdapter
    from hotswap.integrations.fsdp import ShardedAdapter
    from hotswap.integrations.megatron import MegatronAdapter

    for adapter in (DDPAdapter, MegatronAdapter, ShardedAdapter):
        adapter.reset = _nothing  # type: ignore[method-assign, assignment]


def commit_gate() -> None:
    """A step's update begins although the state before it is in one place only."""
    from hotswap.session.gate import CommitGate
    from hotswap.session.snapshots import Snapshots

    arm = CommitGate.arm

    def arm_for_nothing(self: CommitGate, *args: Any, needs: object, **kwargs: Any) -> None:
        arm(self, *args, needs=None, **kwargs)

    CommitGate.arm = arm_for_nothing  # type: ignore[method-assign, assignment]
    Snapshots.wait_acked = _nothing  # type: ignore[method-assign]


# --- in agents -----------------------------------------------------------------------------------------------------------


def replication_again() -> None:
    """After a recovery nobody looks whether the resume step is in two places again."""
    from hotswap.node.memory_keeper import MemoryKeeper

    MemoryKeeper.ensure_replicated = (  # type: ignore[method-assign]
        lambda self, slot, step, plan: self._ack(slot, plan.generation, step)
    )


def slow_link() -> None:
    """Each replica takes longer to its holder than a step takes."""
    from hotswap.node.memory_keeper import MemoryKeeper

    push = MemoryKeeper._push

    def slowly(self: MemoryKeeper, *arguments: Any) -> Any:
        time.sleep(SLOW_PUSH_S)
        return push(self, *arguments)

    MemoryKeeper._push = slowly  # type: ignore[method-assign]


def own_snapshots() -> None:
    """A worker takes its snapshots with it when it dies."""
    from hotswap.node.memory_keeper import MemoryKeeper

    inventory = MemoryKeeper.inventory
    MemoryKeeper.inventory = lambda self: tuple(  # type: ignore[method-assign]
        item for item in inventory(self) if item.kind.value != "own"
    )


def manifest() -> None:
    """All shards of a checkpoint are written, and nothing that says so."""
    from hotswap.replication import durable_index

    durable_index.commit = _nothing


def alone() -> None:
    """An agent that has lost its coordinator gives up."""
    from hotswap.node.control import ControlChannel

    serve = ControlChannel._serve

    async def once(self: ControlChannel, link: Any) -> None:
        await serve(self, link)
        raise RuntimeError("the coordinator is gone")

    ControlChannel._serve = once  # type: ignore[method-assign]


def memory_of_the_job() -> None:
    """An agent that finds a new coordinator presents itself as if it had just come."""
    from dataclasses import replace

    from hotswap.node.agent import Agent

    register = Agent._register
    Agent._register = lambda self: replace(  # type: ignore[method-assign]
        register(self), generation=0, places=(), built=()
    )


def _by_name(*functions: Callable[[], None]) -> dict[str, Callable[[], None]]:
    return {function.__name__: function for function in functions}


IN_WORKERS = _by_name(random_states, undo, one_bit, abort, reset, commit_gate)
IN_AGENTS = _by_name(replication_again, slow_link, own_snapshots, manifest, alone, memory_of_the_job)
