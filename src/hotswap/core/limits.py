"""What bounds a job."""

from __future__ import annotations

from dataclasses import dataclass

LINK_FLOOR = 100e6
"""Bytes per second between two nodes for one slot, at least: deadlines of transfers grow with their size at this rate."""
SLOW_RATIO = 1.5
"""So many times as long as others is slow. Clocks of equal GPUs differ by a few per cent, a loaded host's by a tenth or two."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes and deadlines of a job. Times in seconds.

    ``phase_s``: longest time a phase may take once every worker is built, beside what moving state takes; ``build_s``: longest time for building one;
    ``spare_first``: where a worker is lost and a spare stands built for its node's place, the spare takes the place and the node
    becomes the spare, instead of starting a new worker on it. ``replicas``: nodes that keep a copy of each snapshot, its owner not counted. ``slow_ratio``: so many times as long as its peers makes a worker slow; ``evict_slow``: and so many costs its node the
    place, 0 for never. ``keep_groups``: process groups that a loss has not touched are not formed anew. ``last_call_s``: how long a complete job waits for further
    spares; ``recoveries_max``: planned recoveries without a newly committed step in between, after which going on is pointless; ``hangs_max``: hangs in the same place at
    the same step that are answered, the second one on another node; ``respawns_max``: the same for the deaths of one slot's
    workers. ``halt_s``: how long
    the last worker may come to a halt after the first. ``checkpoints``: there is storage for durable ones.
    ``nodes_min``: with so many nodes the job may still go on if no other comes, 0: only with all of them. ``hang_s``, ``hang_floor_s``, ``hang_ceiling_s``, ``pause_s``: see ``HangWatch``; ``hang_s`` of None follows the
    job's own steps, of 0 looks for no hangs.
    """

    nodes_active: int
    nodes_max: int
    width: int
    detection_budget_s: float = 5.0
    phase_s: float = 30.0
    build_s: float = 600.0
    join_s: float = 600.0
    last_call_s: float = 2.0
    spare_wait_s: float = 60.0
    trouble_grace_s: float = 1.0
    halt_s: float = 2.5
    checkpoints: bool = False
    nodes_min: int = 0
    hang_s: float | None = 0.0
    hang_floor_s: float = 60.0
    hang_ceiling_s: float = 480.0
    pause_s: float = 0.0
    respawns_max: int = 3
    recoveries_max: int = 10
    hangs_max: int = 2
    spare_first: bool = False
    replicas: int = 1
    slow_ratio: float = SLOW_RATIO
    evict_slow: float = 0.0
    keep_groups: bool = True

    def __post_init__(self) -> None:
        """Assert what every deadline below relies on; left on in production."""
        assert 1 <= self.nodes_active <= self.nodes_max, f"{self.nodes_active} active of {self.nodes_max} nodes"
        assert self.width >= 1, f"{self.width} slots a node"
        assert self.replicas >= 1, f"{self.replicas} replicas"
        assert 0 <= self.nodes_min <= self.nodes_active, f"at least {self.nodes_min} of {self.nodes_active} nodes"
