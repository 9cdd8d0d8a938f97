"""What the agent tells a worker through its environment."""

from __future__ import annotations

import signal
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from hotswap.core.types import Slot

PREFIX = "HOTSWAP_"
LINK_FD = PREFIX + "LINK_FD"
STACKS_FD = PREFIX + "STACKS_FD"
STACKS_SIGNAL = int(signal.SIGRTMIN) + 9
"""Makes a worker write where its threads are; a real-time signal that nothing else is known to use."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """``full_world_size``: slots of the job as it was started, 0: as many as now. ``resizes``: it may go on with fewer.
    ``rehearse``: run one step on detached groups before reporting built. Times in seconds.

    ``collective_timeout_s``: longest a collective may wait; failures are noticed long before by other means.
    ``abort_s``: longest the end of a generation may take in this process before the agent replaces it.
    ``snapshot_interval_steps`` and ``overhead_limit``: see ``Pace``. ``integrity_every_steps``: see ``Comparison``.
    ``stacks_fd``: file for the stacks of all threads, -1 for none. ``heartbeat_s``: how often it says how far it is.
    ``halt_s``: how long it stands still at a boundary for a swap that does not come; ``durable_halt_s``: if the boundary goes to storage first.
    ``trouble_s``: how long a failed collective waits to be told that a peer is gone before it counts as this script's error.
    """

    slot: Slot
    world_size: int
    link_fd: int
    full_world_size: int = 0
    resizes: bool = False
    host: str = "127.0.0.1"
    rehearse: bool = False
    buffers: int = 2
    checkpoint_dir: str = ""
    checkpoint_interval_steps: int = 0
    snapshot_interval_steps: int = 1
    overhead_limit: float = 0.0
    integrity_every_steps: int = 0
    settle_s: float = 0.05
    abort_s: float = 10.0
    trouble_s: float = 50.0
    collective_timeout_s: float = 600.0
    heartbeat_s: float = 0.4
    halt_s: float = 2.0
    durable_halt_s: float = 32.0
    stacks_fd: int = -1

    def to_environment(self) -> dict[str, str]:
        """For the worker's environment."""
        return {
            PREFIX + name.upper(): str(int(value) if isinstance(value, bool) else value)
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerSettings | None:
        """Settings of this worker, or None when it was not started by an agent."""
        if LINK_FD not in environment:
            return None

        def text(name: str) -> str:
            return environment[PREFIX + name]

        return cls(
            slot=int(text("SLOT")),
            world_size=int(text("WORLD_SIZE")),
            link_fd=int(text("LINK_FD")),
            full_world_size=int(text("FULL_WORLD_SIZE")),
            resizes=text("RESIZES") == "1",
            host=text("HOST"),
            rehearse=text("REHEARSE") == "1",
            buffers=int(text("BUFFERS")),
            checkpoint_dir=text("CHECKPOINT_DIR"),
            checkpoint_interval_steps=int(text("CHECKPOINT_INTERVAL_STEPS")),
            snapshot_interval_steps=int(text("SNAPSHOT_INTERVAL_STEPS")),
            overhead_limit=float(text("OVERHEAD_LIMIT")),
            integrity_every_steps=int(text("INTEGRITY_EVERY_STEPS")),
            settle_s=float(text("SETTLE_S")),
            abort_s=float(text("ABORT_S")),
            trouble_s=float(text("TROUBLE_S")),
            collective_timeout_s=float(text("COLLECTIVE_TIMEOUT_S")),
            heartbeat_s=float(text("HEARTBEAT_S")),
            halt_s=float(text("HALT_S")),
            durable_halt_s=float(text("DURABLE_HALT_S")),
            stacks_fd=int(text("STACKS_FD")),
        )


_adopted: list[WorkerSettings] = []


def adopt(environment: MutableMapping[str, str]) -> WorkerSettings | None:
    """Take this worker's settings, once, and its descriptors out of *environment*.

    What the script starts must not take itself for the worker: the descriptors are not in it.
    """
    settings = WorkerSettings.from_environment(environment)
    if settings is not None:
        del environment[LINK_FD], environment[STACKS_FD]
        _adopted.append(settings)
    return settings


def adopted() -> WorkerSettings | None:
    """The settings of this worker, None in any other process."""
    return _adopted[-1] if _adopted else None
