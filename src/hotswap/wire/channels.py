"""Which messages belong on which channel."""

from __future__ import annotations

from typing import Any, get_args

from hotswap.core import messages as m
from hotswap.core.commands import Command
from hotswap.wire import worker_messages as w
from hotswap.wire.codec import Codec


def control_codec() -> Codec[Any]:
    """Agent and coordinator."""
    return Codec([*get_args(m.FromAgent), *get_args(m.AsideMessage), *get_args(m.ToAgent), *get_args(Command)])


def worker_codec() -> Codec[Any]:
    """Worker and agent."""
    return Codec([*get_args(w.FromWorker), *get_args(w.ToWorker)])
