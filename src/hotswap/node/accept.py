"""The coordinator's listening socket."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable

from hotswap.config import CoordinatorConfig

log = logging.getLogger("hotswap.coordinator")
ACCEPT_PAUSE_S = 0.1


def open_listener(host: str, port: int) -> socket.socket:
    """At a numeric address of either family."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.setblocking(False)
    return listener


def listen(config: CoordinatorConfig) -> socket.socket:
    """Listen, and tell the launcher at which port. OSError if somebody else does."""
    listener = open_listener(config.host, config.port)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    return listener


async def accept_all(listener: socket.socket, serve: Callable[[socket.socket, str], None]) -> None:
    """Give *serve* every connection and the address that it comes from, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, address = await loop.sock_accept(listener)
        except OSError as error:
            # A peer that is gone again, or no descriptor left: neither is a reason to listen no more.
            log.warning("accept: %s", error)
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        serve(sock, f"{address[0]}:{address[1]}")
