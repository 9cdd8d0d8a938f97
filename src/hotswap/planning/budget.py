"""Host memory, link time and survivable losses of a job, from its size. The placement is the one that jobs use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from hotswap.core.placement import holders, labels
from hotswap.core.survival import by_domain, fatal_losses, survives, tolerance
from hotswap.core.types import Membership, NodeId, Slot
from hotswap.errors import UsageError

SHARDINGS = ("none", "optimizer", "full")
EXAMPLES_MAX = 3
COMBINATIONS_MAX = 200_000
GROWTH = 1.25
"""Snapshot buffers are reserved with so much room: optimizer state appears with the first update (see session.snapshots)."""
FIXED_NBYTES = 64 * 1024
"""Header, random states, loader: what every slot has alone, about."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sizes in bytes. ``shared_nbytes``: of each slot's state, what its data-parallel peers have too; ``unique_nbytes``: the rest.

    ``domains``: label of each node in order, empty for none. ``link_bytes_s``: of one node, in one direction.
    """

    nodes: int
    width: int
    replicas: int
    shared_nbytes: int
    unique_nbytes: int
    domains: tuple[str, ...] = ()
    checkpoints: bool = False
    integrity: bool = False
    link_bytes_s: float = 12.5e9
    snapshot_interval: int = 1

    def __post_init__(self) -> None:
        """UsageError for what no job can be."""
        if min(self.nodes, self.width, self.replicas, self.snapshot_interval) < 1:
            raise UsageError("nodes, workers of a node, replicas and the snapshot interval are at least 1")
        if self.domains and len(self.domains) != self.nodes:
            raise UsageError(f"{len(self.domains)} fault domains for {self.nodes} nodes: give one label for each node")

    @property
    def membership(self) -> Membership:
        """The nodes by their numbers."""
        return Membership(generation=1, places=tuple(f"node{n}" for n in range(self.nodes)), width=self.width)

    @property
    def labels(self) -> dict[NodeId, str]:
        """Fault domains by node."""
        return dict(zip(self.membership.places, self.domains, strict=False))

    @cached_property
    def holders(self) -> dict[Slot, tuple[NodeId, ...]]:
        """Who keeps whose replicas."""
        return holders(self.membership, self.labels, (), self.replicas)


def state_nbytes(
    parameters: int, *, sharding: str, slots: int, model_parallel: int, state_bytes: float
) -> tuple[int, int]:
    """Shared and unique bytes of a slot. *state_bytes*: for each parameter, master copy and moments (12 for Adam in fp32).

    *sharding* over the data-parallel slots: "none" (DDP), "optimizer" (ZeRO-1, Megatron's distributed optimizer; the model's own
    parameters are gathered from it and not copied) or "full" (FSDP).
    """
    if sharding not in SHARDINGS:
        raise UsageError(f"there is no sharding {sharding!r}; there are {', '.join(SHARDINGS)}")
    if slots % model_parallel:
        raise UsageError(f"{slots} workers cannot be shared out in groups of {model_parallel}: change --model-parallel")
    whole = parameters * state_bytes / model_parallel
    if sharding == "none" and slots > model_parallel:
        return int(whole), FIXED_NBYTES
    return 0, int(whole * model_parallel / slots) + FIXED_NBYTES


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Nodes lost at the same time, and whether the state survives in memory. ``fatal``: some of the sets that it does not survive."""

    what: str
    survivable: bool
    fatal: tuple[tuple[NodeId, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of host memory in one node; seconds of its link for one snapshot, and for a replacement to be restored."""

    snapshot_nbytes: int
    replica_nbytes: int
    link_s: float
    link_s_per_step: float
    restore_s: float
    replicas: int
    tolerates: int
    losses: tuple[Loss, ...]


def budget(job: Job) -> Budget:
    """All of it for the node that has to give most."""
    kept = job.holders
    buffers = 2 + job.checkpoints + job.integrity
    own = job.width * buffers * int(GROWTH * (job.shared_nbytes + job.unique_nbytes))
    held = max((sum(node in nodes for nodes in kept.values()) for node in job.membership.places), default=0)
    out = job.width * job.unique_nbytes * max((len(nodes) for nodes in kept.values()), default=0)
    link_s = max(out, held * job.unique_nbytes) / job.link_bytes_s
    shared = job.shared_nbytes > 0
    return Budget(
        snapshot_nbytes=own,
        replica_nbytes=held * (2 + job.integrity) * job.unique_nbytes,
        link_s=link_s,
        link_s_per_step=link_s / job.snapshot_interval,
        restore_s=job.width * (job.unique_nbytes + job.shared_nbytes) / job.link_bytes_s,
        replicas=min((len(nodes) for nodes in kept.values()), default=0),
        tolerates=tolerance(job.membership, kept, shared=shared),
        losses=(*_by_count(job, shared=shared), *_by_domain(job, shared=shared)),
    )


def _by_count(job: Job, *, shared: bool) -> list[Loss]:
    """One node, two, and so on, up to the first number that is not survivable whichever nodes it hits."""
    found, combinations = [], 1.0
    for count in range(1, job.nodes + 1):
        combinations *= (job.nodes - count + 1) / count
        if combinations > COMBINATIONS_MAX:
            break
        fatal = tuple(islice(fatal_losses(job.membership, job.holders, count, shared=shared), EXAMPLES_MAX))
        what = "any node" if count == 1 else f"any {count} nodes at once"
        found.append(Loss(what=what, survivable=not fatal, fatal=fatal))
        if fatal:
            break
    return found


def _by_domain(job: Job, *, shared: bool) -> list[Loss]:
    found = []
    for label, nodes in by_domain(job.membership, job.labels).items():
        alive = survives(job.membership, job.holders, nodes, shared=shared)
        found.append(
            Loss(what=f"all of {label} ({len(nodes)} nodes)", survivable=alive, fatal=() if alive else (nodes,))
        )
    return found


def expand(texts: Sequence[str]) -> tuple[str, ...]:
    """Labels of nodes in order; ``rack=a*4`` stands for four nodes with that label. UsageError for what makes no sense."""
    found: list[str] = []
    for text in texts:
        label, star, count = text.rpartition("*")
        if star and not count.isdigit():
            raise UsageError(f"--fault-domain {text}: write LABEL, or LABEL*NUMBER for so many nodes")
        label = label if star else text
        if not labels(label):
            raise UsageError(f"--fault-domain {text}: the label is empty")
        found += [label] * (int(count) if star else 1)
    return tuple(found)
