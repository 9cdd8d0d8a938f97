"""Stable process groups: objects that never change, with backends that can be swapped."""

from hotswap.comm.groups import BACKEND_NAME, CONTROL_KEY, Groups
from hotswap.comm.port import AbortReport, ConnectReport, Rendezvous
from hotswap.comm.safe_points import add_safe_points
from hotswap.core.keep import GroupState, groups_to_keep

__all__ = [
    "BACKEND_NAME",
    "CONTROL_KEY",
    "AbortReport",
    "ConnectReport",
    "GroupState",
    "Groups",
    "Rendezvous",
    "add_safe_points",
    "groups_to_keep",
]
