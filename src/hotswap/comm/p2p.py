"""Noticing point-to-point traffic.

The number of operations alone says nothing about it: a send that the peer has not asked for yet counts like one that
was received. A group in which anything was sent or received is never kept over a swap, so each such call is noted.
Collectives are not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

METHODS = ("send", "recv", "recv_anysource")
_used: set[int] = set()
_newest: dict[int, Any] = {}
_installed: list[str] = []


def install() -> None:
    """Watch the methods through which all point-to-point operations of Python programs go; once per process."""
    for name in METHODS:
        if name not in _installed:
            setattr(ProcessGroup, name, _watched(getattr(ProcessGroup, name)))
            _installed.append(name)


def used(group: ProcessGroup) -> bool:
    """Whether anything was sent or received in the group since ``forget``."""
    return id(group) in _used


def forget(group: ProcessGroup) -> None:
    """The group has a new backend, in which nothing was sent yet."""
    _used.discard(id(group))
    _newest.pop(id(group), None)


def newest() -> list[Any]:
    """The last operation of each group. ``dist.recv`` waits for one that no variable of any function holds."""
    return list(_newest.values())


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _used.add(id(self))
        work = _newest[id(self)] = method(self, *args, **kwargs)
        return work

    return call
