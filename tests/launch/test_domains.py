"""What a node's surroundings say of its fault domains."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.core.placement import labels
from hotswap.errors import UsageError
from hotswap.launch.domains import discover


def test_what_was_said_comes_first() -> None:
    environment = {"HOTSWAP_FAULT_DOMAIN": "rack7", "SLURM_TOPOLOGY_ADDR": "s0.n1", "HOTSWAP_NODE_LABELS": "/none"}
    assert discover(environment) == "rack7"
    assert discover({}) == ""


def test_slurm_names_the_switches_above_a_node() -> None:
    tree = {"SLURM_TOPOLOGY_ADDR": "core.leaf3.tux7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert labels(discover(tree)) == {"switch=core", "switch=leaf3"}
    assert labels(discover({"SLURM_TOPOLOGY_ADDR": "core.leaf3.tux7"})) == {"switch=core", "switch=leaf3"}
    both = {"SLURM_TOPOLOGY_ADDR": "s[0,1].tux7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    assert labels(discover(both)) == {"switch=s[0;1]"}
    flat = {"SLURM_TOPOLOGY_ADDR": "tux7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert discover(flat) == ""


def test_labels_of_a_kubernetes_node(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_text(
        'kubernetes.io/hostname="n7"\ntopology.kubernetes.io/rack="r2"\ntopology.kubernetes.io/zone=eu-1\nno label\n'
    )
    assert labels(discover({"HOTSWAP_NODE_LABELS": str(path)})) == {"zone=eu-1", "rack=r2"}
    with pytest.raises(UsageError, match="HOTSWAP_NODE_LABELS"):
        discover({"HOTSWAP_NODE_LABELS": str(tmp_path / "missing")})
