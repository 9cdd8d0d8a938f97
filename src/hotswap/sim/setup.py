"""What a simulated job is like, drawn from its seed: sizes, durations, what it may do, and what is left out of the protocol."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hotswap.sim.world import World

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job and its surroundings. ``versions``, ``gate``, ``all_holders``, ``checked`` (checksums), ``drop_undone``, ``drop_resized``, ``lease`` and
    ``keep_agreed`` can be spoilt, to see the checkers find it.

    ``event_log``: a restarted coordinator still has the log of the one before it. ``flaky``: share of transfers that fail.
    ``shared``: every slot has state that all others have too and that is not replicated. ``durable_steps``: between durable
    checkpoints; 0: none. ``coordinators``: more than one share a store. ``device``: snapshots are copied behind the computation. ``paced``: snapshots move apart at random.
    ``drain_s``: how long nodes that have to leave wait for a spare. ``nodes_min``: it may go on with so many.
    """

    nodes_active: int
    spares: int
    width: int
    steps: int
    domains: int
    faults: int
    flaky: float
    event_log: bool
    shared: bool
    durable_steps: int
    device: bool
    paced: bool
    spare_first: bool
    drain_s: float
    replicas: int
    integrity: int
    nodes_min: int = 0
    coordinators: int = 1
    versions: int = 2
    gate: bool = True
    all_holders: bool = True
    checked: bool = True
    spare_wait_s: float = 60.0
    drop_undone: bool = True
    drop_resized: bool = True
    lease: bool = True
    keep_agreed: bool = True
    build_s: Range = (0.1, 3.0)
    compute_s: Range = (0.02, 0.3)
    update_s: Range = (0.001, 0.03)
    copy_s: Range = (0.001, 0.03)
    restore_s: Range = (0.001, 0.1)
    transfer_s: Range = (0.002, 0.1)

    def __str__(self) -> str:
        """For transcripts."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def draw_setup(seed: int, world: World, **spoilt: object) -> Setup:
    """A random job. *spoilt*: fields that are not left to chance."""
    dice = world.dice
    slow = dice.random() < 0.3
    nodes_active = dice.randint(1, 4)
    values: dict[str, object] = {
        "nodes_active": nodes_active,
        "spares": dice.randint(1, 3),
        "width": dice.randint(1, 2),
        "steps": dice.randint(6, 14),
        "domains": dice.choice((0, 0, 2)),
        "faults": dice.randint(1, 4),
        "flaky": dice.choice((0.0, 0.0, 0.05)),
        "event_log": dice.random() < 0.7,
        "shared": dice.random() < 0.5,
        "durable_steps": dice.choice((0, 0, 2, 3)),
        "device": dice.random() < 0.3,
        "paced": dice.random() < 0.3,
        "spare_first": dice.random() < 0.5,
        "drain_s": dice.choice((0.0, 3.0, 30.0)),
        "replicas": 2 if seed % 3 == 2 else 1,
        "integrity": 1 + seed % 3 if seed % 4 == 1 else 0,
        "transfer_s": (0.05, 0.8) if slow else (0.002, 0.1),
    }
    return _with_fewer_nodes(seed, Setup(**{**values, **spoilt}), spoilt)  # type: ignore[arg-type]


def _with_fewer_nodes(seed: int, setup: Setup, spoilt: Mapping[str, object]) -> Setup:
    """Every fifth seed, if there is storage, may shrink, and soon enough for it to happen before a new node comes."""
    if seed % 5 != 3 or not setup.durable_steps or setup.nodes_active == 1 or "nodes_min" in spoilt:
        return setup
    dice = random.Random(f"sizes of {seed}")
    values: dict[str, Any] = {
        "nodes_min": 1,
        "spares": dice.choice((0, 0, 1)),
        "spare_wait_s": dice.choice((0.3, 3.0)),
        "steps": setup.steps + dice.randint(0, 20),
    }
    return replace(setup, **{name: value for name, value in values.items() if name not in spoilt})
