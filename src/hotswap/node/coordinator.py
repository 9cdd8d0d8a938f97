"""The coordinator process: sockets, clock and files around the pure state machine of ``hotswap.core.coordinator``.

Reads its CoordinatorConfig as JSON on standard input, prints ``{"port": N}`` when it listens, and leaves with the job's
exit code. It may be killed and started again on the same port at any moment; training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from hotswap.config import CoordinatorConfig
from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Disconnect, Event, Exit, FromNode, NodeGone, Record, Send, StopAsked, Tick
from hotswap.core.past import recall
from hotswap.core.rendezvous import RendezvousTable
from hotswap.core.types import NodeId
from hotswap.errors import EXIT_REQUEUE, HotswapError, PeerUnreachable, ProtocolError
from hotswap.node.eventlog import EventLog
from hotswap.node.inquiry import Inquiry
from hotswap.node.process import die_with_parent, set_up_logging
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import accept_link
from hotswap.wire.links import AsyncLink

log = logging.getLogger("hotswap.coordinator")
FLUSH_S = 2.0
ACCEPT_PAUSE_S = 0.1
WARNINGS = {"all_paused": "nobody advances", "hang_found": "training hangs"}
"""Events that somebody who watches should see at once; ``why`` says the rest."""


class CoordinatorServer:
    """One job's coordinator; all state is in the machine and in open connections."""

    def __init__(self, config: CoordinatorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing but the event log is opened before ``run``."""
        self.config = config
        self.clock = clock
        self.events = self._make_events()
        past = recall(self.events.read()) if config.restarted else None
        self.machine = Coordinator(limits_of(config), clock(), past)
        self.rendezvous: RendezvousTable[NodeId] = RendezvousTable()
        self.links: dict[NodeId, AsyncLink[Any]] = {}
        self.inquiry = self._make_inquiry()
        self._refused = 0
        self._done: asyncio.Future[int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._awake_at = clock()
        self._serving: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    # What touches the machine is made here, so that the simulator can put something else in its place.

    def _make_events(self) -> EventLog:
        return EventLog(Path(self.config.events_path), go_on=self.config.restarted)

    def _make_inquiry(self) -> Inquiry:
        history = self.config.node_history
        return Inquiry(self.events.write, Path(history) if history else None, self._handle_or_end)

    async def _open(self, sock: socket.socket) -> AsyncLink[Any]:
        return await accept_link(sock, control_codec(), self.config.token, self.config.timing.connect_s)

    async def run(self) -> int:
        """Serve until the job ends; the job's exit code."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        listener = socket.create_server((self.config.host, self.config.port), backlog=1024)
        listener.setblocking(False)
        deadlines_s = {name: seconds for name, seconds, _ in self.config.timing.table()}
        log.info("deadlines, s: %s", ", ".join(f"{name} {seconds:g}" for name, seconds in deadlines_s.items()))
        started = {"restarted": self.config.restarted, "pid": os.getpid(), "deadlines_s": deadlines_s}
        self.events.write("coordinator_started", started)
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        accepting = self._start(self._accept(listener), self._serving)
        pulse = self._start(self._pulse(), self._serving)
        self._set_timer()
        try:
            code = await self._done
            await self.inquiry.close()
            return code
        finally:
            accepting.cancel()
            pulse.cancel()
            listener.close()
            # The other tasks own the links: they end with the loop, after the last words.
            await asyncio.gather(*(link.flush(FLUSH_S) for link in self.links.values()), *self._leaving)
            self.events.close()

    def _start(self, coroutine: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        group.add(task)
        task.add_done_callback(group.discard)
        task.add_done_callback(self._crash_with)
        return task

    def _crash_with(self, task: asyncio.Task[None]) -> None:
        """Rather no coordinator than one with half a transition behind it: the next one learns all from the agents."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _asked_to_stop(self, number: int) -> None:
        self._handle(StopAsked(exit_code=128 + number, reason=f"stopped by signal {signal.Signals(number).name}"))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                # A peer that is gone again, or no descriptor left: neither is a reason to listen no more.
                log.warning("accept: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._start(self._serve(sock, f"{address[0]}:{address[1]}"), self._serving)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """One agent's connection from handshake to end."""
        link: AsyncLink[Any] | None = None
        try:
            link = await self._open(sock)
            first = await asyncio.wait_for(link.receive(), self.config.timing.connect_s)
            if not isinstance(first, m.Register):
                raise ProtocolError(f"the first message is {type(first).__name__}, not Register")
        except (HotswapError, asyncio.TimeoutError, OSError) as error:
            self._refuse(peer, str(error) or "nothing was said in time")
        else:
            await self._listen(peer, first, link)
        finally:
            if link is None:
                sock.close()
            else:
                link.close()

    def _refuse(self, peer: str, reason: str) -> None:
        self._refused += 1
        # Whoever asks again and again must not fill the disk: the 1st, 2nd, 4th, 8th... is told, with their number.
        if self._refused & (self._refused - 1) == 0:
            log.warning("connection from %s refused: %s", peer, reason)
            self.events.write("connection_refused", {"peer": peer, "reason": reason, "count": self._refused})

    async def _listen(self, peer: str, register: m.Register, link: AsyncLink[Any]) -> None:
        node = register.node
        previous, self.links[node] = self.links.get(node), link
        if previous is not None:
            previous.close()
        self._handle(FromNode(node=node, message=register))
        try:
            while True:
                self._receive(node, link, await link.receive())
        except PeerUnreachable as error:
            reason = str(error)
        except HotswapError as error:
            reason = f"refused: {error}"
            self._refuse(peer, str(error))
        # Only the newest connection of a node speaks for it.
        if self.links.get(node) is link:
            del self.links[node]
            self._handle(NodeGone(node=node, reason=reason))

    def _receive(self, node: NodeId, link: AsyncLink[Any], message: Any) -> None:
        table = self.rendezvous
        if isinstance(message, m.KvSet):
            for asker in table.set(message.generation, message.key, message.value):
                self._answer(asker, message.generation, message.key, message.value)
        elif isinstance(message, m.KvGet):
            value = table.get(message.generation, message.key, node)
            if value is not None:
                self._answer(node, message.generation, message.key, value)
        elif isinstance(message, m.WorkerEvidence):
            self.inquiry.hear(node, message)
        elif isinstance(message, m.NodeChecked):
            self.inquiry.hear_check(node, message)
        elif isinstance(message, m.WorkerStacks):
            fields = {"generation": message.generation, "slot": message.slot, "node": node, "stacks": message.stacks}
            self.events.write("worker_stacks", fields)
        elif self.links.get(node) is link:
            self._handle(FromNode(node=node, message=message))

    def _answer(self, node: NodeId, generation: int, key: str, value: bytes) -> None:
        if node in self.links:
            self.links[node].send(m.KvValue(generation=generation, key=key, value=value))

    def _handle(self, event: Event) -> None:
        """Run one event through the machine and carry out what it says."""
        effects = self.machine.handle(event, self.clock())
        if self.machine.membership is not None:
            self.rendezvous.advance(self.machine.membership.generation)
        # First the log: a successor that reads it must not know less than somebody was told.
        for effect in effects:
            if isinstance(effect, Record):
                self.events.write(effect.event, effect.fields)
                self.inquiry.saw(effect.event, effect.fields)
                if effect.event in WARNINGS:
                    # One line for the launcher's console.
                    print(json.dumps({"warning": f"{WARNINGS[effect.event]}: {effect.fields['why']}"}), flush=True)
        for effect in effects:
            if isinstance(effect, Send):
                if effect.node in self.links:
                    self.links[effect.node].send(effect.message)
            elif isinstance(effect, Disconnect):
                self._disconnect(effect.node)
            elif isinstance(effect, Exit):
                self._finish(effect.exit_code)
        self._set_timer()

    def _disconnect(self, node: NodeId) -> None:
        """Let what was just queued (a Stop) out, then close; its end is no news to the machine."""
        link = self.links.pop(node, None)
        if link is not None:
            self._start(_flush_and_close(link), self._leaving)

    def _finish(self, exit_code: int) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(exit_code)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay = self.machine.deadline() - self.clock()
        if delay != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.0) + 0.001, self._tick)

    async def _pulse(self) -> None:
        """Notice when this process did not get to run: others were not silent then, it was deaf."""
        while True:
            await asyncio.sleep(self.config.timing.heartbeat_s)
            overslept_s = self._overslept()
            if overslept_s:
                self._handle(Tick(overslept_s=overslept_s))

    def _overslept(self) -> float:
        """How much later than it should have been somebody looked here last; 0 for what a busy machine does."""
        now, heartbeat_s = self.clock(), self.config.timing.heartbeat_s
        late_s, self._awake_at = now - self._awake_at - heartbeat_s, now
        if late_s <= heartbeat_s:
            return 0.0
        log.warning("this process did not run for %.1f s", late_s)
        return late_s

    def _tick(self) -> None:
        self._handle_or_end(Tick(overslept_s=self._overslept()))

    def _handle_or_end(self, event: Event) -> None:
        """For what comes from no connection, whose task would say that something is wrong."""
        try:
            self._handle(event)
        except Exception as error:
            log.exception("%s could not be handled", type(event).__name__)
            if self._done is not None and not self._done.done():
                self._done.set_exception(error)


async def _flush_and_close(link: AsyncLink[Any]) -> None:
    await link.flush(FLUSH_S)
    link.close()


def limits_of(config: CoordinatorConfig) -> Limits:
    """The machine's limits of a job's configuration."""
    return Limits(
        nodes_active=config.nodes_active,
        nodes_max=config.nodes_max,
        width=config.nproc_per_node,
        detection_budget_s=config.timing.detection_budget_s,
        phase_s=config.timing.phase_s,
        trouble_grace_s=config.timing.trouble_grace_s,
        join_s=config.join_s,
        build_s=config.join_s,
        hang_s=config.timing.hang_s,
        hang_floor_s=config.timing.hang_floor_s,
        hang_ceiling_s=config.timing.hang_ceiling_s,
        pause_s=config.timing.pause_s,
        spare_wait_s=config.spare_wait_s,
        respawns_max=config.respawns_max,
        spare_first=config.spare_first,
    )


def main() -> int:
    """Entry point of ``python -m hotswap.node.coordinator``."""
    die_with_parent()
    set_up_logging()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoordinatorConfig)
    try:
        code = asyncio.run(CoordinatorServer(config).run())
    except OSError as error:
        said = {"error": f"cannot serve on {config.host}:{config.port}: {error}", "errno": error.errno}
        print(json.dumps(said), flush=True)
        return EXIT_REQUEUE
    # A line that a crash cannot print tells the launcher that the job has ended, and not just this process.
    print(json.dumps({"exit_code": code}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
