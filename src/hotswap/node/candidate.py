"""One of several coordinators: stands by while another one leads, takes over when nobody does, and steps down when it may not go on."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotswap.config import CoordinatorConfig
from hotswap.core import messages as m
from hotswap.errors import HotswapError
from hotswap.node.accept import accept_all, listen
from hotswap.node.leadership import Ballot, Deposed, Leader, Leadership
from hotswap.store.port import Store, StoreUnavailable
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import accept_link
from hotswap.wire.links import FLUSH_S, AsyncLink

if TYPE_CHECKING:
    from hotswap.node.coordinator import CoordinatorServer

log = logging.getLogger("hotswap.coordinator")


class Candidate:
    """The process' whole life; it leads in some terms, or in none."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        make_server: Callable[[CoordinatorConfig, Callable[[], float], Leadership], CoordinatorServer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened before ``run``. *make_server* is called whenever this coordinator is to lead."""
        self.config = config
        self.clock = clock
        self.store = store
        self._make_server = make_server
        self.server: CoordinatorServer | None = None
        self._leader = Leader(term=0, host="", port=0)
        self._ended: m.Stop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = 0
        self._life: asyncio.Task[int | None] | None = None

    async def _open(self, sock: socket.socket) -> AsyncLink[Any]:
        return await accept_link(sock, control_codec(), self.config.token, self.config.timing.connect_s)

    async def run(self) -> int | None:
        """Until the job has ended: its exit code. None if a signal has ended this process alone."""
        loop = asyncio.get_running_loop()
        listener = listen(self.config)
        accepting = loop.create_task(accept_all(listener, self.serve))
        self._life = loop.create_task(self.live((self.config.advertise_host, int(listener.getsockname()[1]))))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._life
        except asyncio.CancelledError:
            if not self._asked:
                raise
            return None
        finally:
            accepting.cancel()
            listener.close()
            await self.store.close()

    def _on_signal(self, number: int) -> None:
        """SIGINT, from somebody at a terminal, ends the job if this coordinator leads it. Otherwise another one may lead."""
        self._asked += 1
        if self.server is None and self._life is not None:
            self._life.cancel()
        elif self.server is not None and number == signal.SIGINT:
            self.server.ask_to_stop(number)
        elif self.server is not None:
            self.server.step_down(f"this process was told to end by {signal.Signals(number).name}")

    async def live(self, address: tuple[str, int]) -> int | None:
        """Stand by and lead in turns. *address*: where agents reach this coordinator."""
        ballot = Ballot(self.store, self.config.job_id, address, self.config.timing, self.clock)
        await self._enter(ballot)
        while True:
            found = await self._stand_by(ballot)
            if isinstance(found, int):
                return found
            log.info("this coordinator leads, term %d", found.term)
            past = found.record.past
            code = await (self._lead(found) if past.exit_code is None else self._tell_the_end(found))
            if code is not None or self._asked:
                return code

    async def _enter(self, ballot: Ballot) -> None:
        while True:
            try:
                await ballot.enter(restarted=self.config.restarted)
                return
            except StoreUnavailable as error:
                log.warning("%s", error)
            await asyncio.sleep(ballot.timing.lease_beat_s)

    async def _stand_by(self, ballot: Ballot) -> Leadership | int:
        while True:
            try:
                found = await ballot.look()
            except StoreUnavailable as error:
                log.warning("%s", error)
            else:
                if not isinstance(found, Leader):
                    return found
                self._leader = found
            await asyncio.sleep(ballot.timing.lease_beat_s)

    async def _lead(self, leadership: Leadership) -> int | None:
        self.server = self._make_server(self.config, self.clock, leadership)
        # Should it lead again, its event log is its own.
        self.config = replace(self.config, restarted=True)
        try:
            return await self.server.lead()
        finally:
            self.server = None

    async def _tell_the_end(self, leadership: Leadership) -> int | None:
        """The leader before has ended the job, but not said so to everybody: agents that still ask are told."""
        past, timing = leadership.record.past, self.config.timing
        assert past.exit_code is not None, "the job has ended"
        self._leader = Leader(term=leadership.term, host="", port=0)
        self._ended = m.Stop(exit_code=past.exit_code, reason=past.reason)
        keeping = asyncio.get_running_loop().create_task(leadership.keep())
        try:
            await asyncio.wait([keeping], timeout=timing.lease_s + timing.connect_s)
            await leadership.commit(past, told=True)
            return past.exit_code
        except Deposed:
            return None
        finally:
            self._ended = None
            keeping.cancel()
            await leadership.resign()

    # --- connections -----------------------------------------------------------------------------------------------

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connection that was accepted."""
        if self.server is not None:
            self.server.serve(sock, peer)
            return
        task = asyncio.get_running_loop().create_task(self._send_on(sock, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_on(self, sock: socket.socket, peer: str) -> None:
        """Tell an agent who leads, or that there is nothing left to lead."""
        link: AsyncLink[Any] | None = None
        try:
            link = await self._open(sock)
            await asyncio.wait_for(link.receive(), self.config.timing.connect_s)
            for message in self._answer():
                link.send(message)
            await link.flush(FLUSH_S)
        except (HotswapError, asyncio.TimeoutError, OSError) as error:
            log.info("connection from %s: %s", peer, str(error) or "nothing was said in time")
        finally:
            if link is None:
                sock.close()
            else:
                link.close()

    def _answer(self) -> Sequence[m.ToAgent]:
        leader = self._leader
        if self._ended is not None:
            return [m.Lead(term=leader.term), self._ended]
        return [m.Follow(term=leader.term, host=leader.host, port=leader.port)]
