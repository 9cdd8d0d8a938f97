"""Refusing operations of groups whose backends are about to be aborted.

While NCCL's abort runs, which takes half a second, it holds a lock that every operation of the group begins with. A main
thread that begins one just then can not park before the abort is done. So the groups first refuse whatever is begun from
then on, and operations that are being begun at that moment, microseconds long, get time to return; only then is the abort
begun, which frees those that wait.

There are two ways into a group, and both are closed without a cost while nothing is refused:

* methods of ``ProcessGroup``, through which ``torch.distributed`` goes: they are replaced while something is refused. The
  group's backend itself can not be, since another thread may be looking it up.
* names, by which functional collectives (DTensor, compiled code) look groups up: they are taken back, under c10d's lock.

DDP's reducer holds the group and calls it from C++; it meets the abort's lock as before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hotswap.errors import Fenced

BEGIN_COALESCING = "_start_coalescing"
METHODS = (
    BEGIN_COALESCING,
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "new_window",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""All that begin an operation, in the torch versions that have them. Not those that end one (``_end_coalescing``)."""


class Refusal:
    """Which groups refuse. ``begin`` may be called from any thread, ``lift`` when no thread uses the groups."""

    def __init__(self) -> None:
        """Nothing is refused."""
        self._lock = threading.Lock()
        self._refused: frozenset[int] = frozenset()
        self._replaced: dict[str, Any] = {}
        self._unnamed: dict[str, ProcessGroup] = {}

    def begin(self, groups: Iterable[ProcessGroup]) -> None:
        """From now on operations that are begun in *groups* raise Fenced; functional collectives raise RuntimeError."""
        groups = list(groups)
        with self._lock:
            self._refused |= {id(group) for group in groups}
            if groups and not self._replaced:
                for name in METHODS:
                    if name in vars(ProcessGroup):
                        self._replaced[name] = vars(ProcessGroup)[name]
                        setattr(ProcessGroup, name, self._refusing(name, getattr(ProcessGroup, name)))
            for group in groups:
                known_as = _names().get(group)
                if known_as is not None and known_as not in self._unnamed:
                    _c10d()._unregister_process_group(known_as)
                    self._unnamed[known_as] = group

    def lift(self) -> None:
        """Nothing is refused any more, and every method is what it was before."""
        with self._lock:
            for name, method in self._replaced.items():
                setattr(ProcessGroup, name, method)
            self._replaced.clear()
            for name, group in self._unnamed.items():
                # A group that was destroyed meanwhile has no name any more.
                if group in _names():
                    _c10d()._register_process_group(name, group)
            self._unnamed.clear()
            self._refused = frozenset()

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if id(group) in self._refused and (name == BEGIN_COALESCING or not _is_coalescing(group)):
                raise Fenced(f"the generation of group {group.group_desc!r} has ended: {name} is not begun any more")
            return method(group, *args, **kwargs)

        return call


def _is_coalescing(group: ProcessGroup) -> bool:
    """Whether operations of the group are being put together.

    NCCL counts, in each thread, how many such brackets were opened. One that an exception leaves open would swallow all
    later operations of the thread, so it is let come to its end.
    """
    return group in dist.distributed_c10d._world.pg_coalesce_state


def _names() -> Mapping[ProcessGroup, str]:
    """The groups that were not destroyed. Asking a group itself would look into what another thread may be using."""
    return dist.distributed_c10d._world.pg_names


def _c10d() -> Any:
    return torch._C._distributed_c10d
