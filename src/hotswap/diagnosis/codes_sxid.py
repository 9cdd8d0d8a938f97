"""NVSwitch SXid codes: which of them end the membership of a node.

A fatal error takes a port, and with it every GPU that talks through it; an always fatal one takes the switch and so all
GPUs of the host. The facts are those of NVIDIA's fabric manager guide.
"""

from __future__ import annotations

GUIDE = "https://docs.nvidia.com/datacenter/tesla/pdf/fabric-manager-user-guide.pdf"

FATAL: tuple[int, ...] = (
    11001,
    11009,
    11013,
    11018,
    11019,
    11020,
    12001,
    12002,
    12022,
    12024,
    12025,
    12026,
    12027,
    12030,
    12031,
    12032,
    14017,
    15001,
    15006,
    15009,
    15010,
    15012,
    15013,
    19047,
    19048,
    19054,
    19056,
    19058,
    19060,
    19061,
    19063,
    19064,
    19066,
    19067,
    19069,
    19070,
    24004,
    24005,
    24006,
    24007,
)
"""A port of the switch is down until the node is restarted."""

ALWAYS_FATAL: tuple[int, ...] = (
    12020,
    22003,
    22011,
    23001,
    23002,
    23003,
    23004,
    23005,
    23006,
    23007,
    23008,
    23009,
    23010,
    23011,
    23012,
    23013,
    23014,
    23015,
    23016,
    23017,
)
"""The whole switch is down: every GPU of the host is cut off."""

NON_FATAL_THAT_ENDS_JOBS: tuple[int, ...] = (
    10003,
    11004,
    12028,
    19084,
    20012,
)
"""Called non-fatal, yet traffic over the switch stalls."""

NOTES: tuple[int, ...] = (
    10001,
    10002,
    10004,
    10005,
    11012,
    11021,
    11022,
    11023,
    12021,
    12023,
    15008,
    15011,
    19049,
    19055,
    19057,
    19059,
    19062,
    19065,
    19068,
    19071,
    20001,
    20009,
    22013,
    24001,
    24002,
    24003,
)
"""Corrected errors, replays and thermal events: to be counted, no reason to stop."""

LINK_FAULT_UP = 20034
"""A link went down from its far end: mostly the GPU there died first."""
