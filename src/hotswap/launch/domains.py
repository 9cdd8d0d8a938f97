"""What a node fails together with, as far as its surroundings tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hotswap.errors import UsageError

DOMAIN = "HOTSWAP_FAULT_DOMAIN"
NODE_LABELS = "HOTSWAP_NODE_LABELS"
"""File of Kubernetes node labels, one ``key="value"`` a line as the downward API writes them; see the note in ``discover``."""
TOPOLOGY_LABELS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/rack",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "network.topology.nvidia.com/accelerator",
    "network.topology.nvidia.com/block",
    "network.topology.nvidia.com/spine",
)
"""Labels by which Kubernetes and its providers say where a node is."""


def discover(environment: Mapping[str, str]) -> str:
    """The fault domains as ``--fault-domain`` takes them, empty if nothing is known.

    In order: HOTSWAP_FAULT_DOMAIN; Slurm's topology plugin (SLURM_TOPOLOGY_ADDR, from the switch at the top down to the node);
    a file of node labels. A pod does not see its node's labels by itself: an init container writes them there, or an
    admission policy copies them to the pod, whose own labels the downward API shows. UsageError if that file is not there.
    """
    if environment.get(DOMAIN):
        return environment[DOMAIN]
    if environment.get("SLURM_TOPOLOGY_ADDR"):
        return _slurm(environment["SLURM_TOPOLOGY_ADDR"], environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
    if environment.get(NODE_LABELS):
        return _kubernetes(Path(environment[NODE_LABELS]))
    return ""


def _slurm(address: str, pattern: str) -> str:
    """``core.leaf1.node7`` with the pattern ``switch.switch.node``: all but the node itself, each below the ones before it."""
    names = address.split(".")
    kinds = pattern.split(".") if pattern else ["switch"] * (len(names) - 1) + ["node"]
    shared = [(kind, name) for kind, name in zip(kinds, names, strict=False) if kind != "node"]
    # Where a node has several switches of a level Slurm writes them as one bracketed name; commas would part it here.
    return ",".join(f"{kind}={name.replace(',', ';')}" for kind, name in shared)


def _kubernetes(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{NODE_LABELS}: {error}; have it written before the job starts, or unset it") from None
    known = dict(line.split("=", 1) for line in lines if "=" in line)
    values = {key: _unquoted(known[key]) for key in TOPOLOGY_LABELS if key in known}
    return ",".join(f"{key.rpartition('/')[2]}={value}" for key, value in values.items())


def _unquoted(value: str) -> str:
    try:
        return str(json.loads(value))
    except ValueError:
        return value
