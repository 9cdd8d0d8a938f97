"""The agent's channel to the coordinator: connects, registers, and does both again whenever the connection ends.

Where there are several coordinators it asks one after the other until it has found the one that leads. A leader says so with a
term when it is connected and again and again; one of an earlier term is refused, and one that has fallen silent is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from hotswap.config import AgentConfig
from hotswap.core import messages as m
from hotswap.core.leader_search import LeaderSearch
from hotswap.errors import AuthError, HotswapError
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

log = logging.getLogger("hotswap.control")
RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0


class _Elsewhere(HotswapError):
    """Whoever is connected does not lead, or not any more."""


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
        self._search = LeaderSearch([(config.coordinator_host, config.coordinator_port), *config.coordinators])
        self._led = False

    @property
    def alone_s(self) -> float:
        """For how long no coordinator has heard this agent, 0 while one does."""
        return 0.0 if self._led else self._clock() - self._alone_since

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
                link = await self._open(*self._search.next())
            except AuthError:
                raise
            except HotswapError as error:
                log.info("coordinator: %s; training goes on without it", error)
            else:
                await self._serve(link)
            # A coordinator that accepts and hangs up at once must not be asked without a pause either.
            delay = RETRY_FIRST_S if loop.time() - began > RETRY_MAX_S else min(2 * delay, RETRY_MAX_S)
            await asyncio.sleep(delay)

    async def _open(self, host: str, port: int) -> AsyncLink[Any]:
        timing = self._config.timing
        timeout_s = min(timing.connect_s, timing.lease_s) if self._search.several else timing.connect_s
        return await open_link(host, port, control_codec(), self._config.token, timeout_s)

    async def _serve(self, link: AsyncLink[Any]) -> None:
        """One connection, from registration to its end. What goes wrong in receiving a message is not the link's fault."""
        link.send(self._register())
        # From here on everything is said that is not in the registration, also to one that may turn out not to lead.
        self._link = link
        # Where there are several, whoever does not say that it leads does not.
        self._led = not self._search.several
        try:
            while (message := await self._next(link)) is not None:
                if isinstance(message, m.Lead):
                    self._accept(message)
                elif isinstance(message, m.Follow):
                    self._search.follow(message)
                    break
                elif self._led:
                    self._receive(message)
        except _Elsewhere as reason:
            log.info("coordinator: %s; looking for another one", reason)
        finally:
            link.close()
            self._link = None
            if self._led:
                self._led, self._alone_since = False, self._clock()

    def _accept(self, message: m.Lead) -> None:
        if not self._search.accept(message):
            raise _Elsewhere(f"it leads in term {message.term}, which is over: the newest is {self._search.term}")
        self._led = True

    async def _next(self, link: AsyncLink[Any]) -> Any | None:
        """The next message; None at the end of the connection."""
        try:
            return await asyncio.wait_for(link.receive(), self._config.timing.lease_s if self._search.several else None)
        except asyncio.TimeoutError:
            raise _Elsewhere("it says nothing") from None
        except HotswapError as error:
            log.info("coordinator: %s; training goes on without it", error)
            return None

    async def flush(self) -> None:
        """Wait until what was said is with the kernel, or the connection has been given up."""
        if self._link is not None:
            await self._link.flush(self._config.timing.connect_s)

    async def close(self) -> None:
        """Let the last words out."""
        # The connection may end, and be forgotten, while its last words go out.
        link = self._link
        await self.flush()
        if link is not None:
            link.close()
