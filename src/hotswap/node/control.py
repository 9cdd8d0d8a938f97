"""The agent's channel to the coordinator: connects, registers, and does both again whenever the connection ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.errors import AuthError, HotswapError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

log = logging.getLogger("hotswap.control")
RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0


class ControlChannel:
    """What is sent while there is no coordinator is dropped: the next registration says all that still matters."""

    def __init__(
        self,
        config: AgentConfig,
        register: Callable[[], m.Register],
        receive: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*register* makes the first message of every connection; *receive* gets every message of the coordinator."""
        self._clock = clock
        self._config = config
        self._register = register
        self._receive = receive
        self._link: AsyncLink[Any] | None = None
        self._alone_since = clock()

    @property
    def alone_s(self) -> float:
        """For how long no coordinator has heard this agent, 0 while one does."""
        return 0.0 if self._link is not None else self._clock() - self._alone_since

    def send(self, message: Any) -> None:
        """Tell the coordinator, if there is one."""
        if self._link is not None:
            self._link.send(message)

    async def run(self) -> None:
        """Serve for ever. AuthError (this agent has another job's token) and the receiver's errors are the only ways out."""
        loop = asyncio.get_running_loop()
        delay = RETRY_FIRST_S
        while True:
            began = loop.time()
            try:
                link = await self._open()
            except AuthError:
                raise
            except HotswapError as error:
                log.info("coordinator: %s; training goes on without it", error)
            else:
                await self._serve(link)
            # A coordinator that accepts and hangs up at once must not be asked without a pause either.
            delay = RETRY_FIRST_S if loop.time() - began > RETRY_MAX_S else min(2 * delay, RETRY_MAX_S)
            await asyncio.sleep(delay)

    async def _open(self) -> AsyncLink[Any]:
        config = self._config
        return await open_link(
            config.coordinator_host, config.coordinator_port, control_codec(), config.token, config.timing.connect_s
        )

    async def _serve(self, link: AsyncLink[Any]) -> None:
        """One connection, from registration to its end. What goes wrong in receiving a message is not the link's fault."""
        link.send(self._register())
        self._link = link
        try:
            while (message := await _next(link)) is not None:
                self._receive(message)
        finally:
            link.close()
            self._link = None
            self._alone_since = self._clock()

    async def close(self) -> None:
        """Let the last words out."""
        # The connection may end, and be forgotten, while its last words go out.
        link = self._link
        if link is not None:
            await link.flush(self._config.timing.connect_s)
            link.close()


async def _next(link: AsyncLink[Any]) -> Any | None:
    try:
        return await link.receive()
    except HotswapError as error:
        log.info("coordinator: %s; training goes on without it", error)
        return None
