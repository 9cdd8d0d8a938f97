"""The coordinator process: sockets, clock and files around the pure state machine of ``hotswap.core.coordinator``.

Reads its CoordinatorConfig as JSON on standard input, prints ``{"port": N}`` when it listens, and leaves with the job's
exit code. It may be killed and started again on the same port at any moment; training goes on meanwhile. With a store it is one
of several, of which one leads (``candidate``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hotswap.config import CoordinatorConfig
from hotswap.core import messages as m
from hotswap.core.commands import Drain, Inject
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Disconnect, Effect, Event, Exit, FromNode, NodeGone, Record, Send, StopAsked, Tick
from hotswap.core.past import Past, recall
from hotswap.core.rendezvous import RendezvousTable
from hotswap.core.types import Generation, NodeId
from hotswap.errors import (
    EXIT_REQUEUE,
    EXIT_USAGE,
    AuthError,
    HotswapError,
    PeerUnreachable,
    ProtocolError,
    UsageError,
)
from hotswap.node.accept import accept_all, listen
from hotswap.node.candidate import Candidate
from hotswap.node.drills import Drills
from hotswap.node.eventlog import EventLog
from hotswap.node.inquiry import Inquiry
from hotswap.node.leadership import Deposed, Leadership, Outbox
from hotswap.node.orders import Orders
from hotswap.node.process import die_with_parent, set_up_logging
from hotswap.store.open import open_store
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import accept_link
from hotswap.wire.links import FLUSH_S, AsyncLink

log = logging.getLogger("hotswap.coordinator")
WARNINGS = {"all_paused": "nobody advances", "hang_found": "training hangs"}
"""Events that somebody who watches should see at once; ``why`` says the rest."""


class CoordinatorServer:
    """One job's coordinator; all state is in the machine and in open connections."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Callable[[], float] = time.monotonic,
        leadership: Leadership | None = None,
    ) -> None:
        """Nothing but the event log is opened before ``run`` or ``lead``. *leadership*: there are other coordinators too."""
        self.config = config
        self.clock = clock
        self.leadership = leadership
        self.events = self._make_events()
        self.machine = self._make_machine(limits_of(config), self._recall())
        self.outbox = Outbox(leadership, self._release) if leadership is not None else None
        self.rendezvous: RendezvousTable[NodeId] = RendezvousTable()
        self.links: dict[NodeId, AsyncLink[Any]] = {}
        self.inquiry = self._make_inquiry()
        self.drills = Drills(config, clock, self.machine.job, self.links, self._note)
        self.orders = Orders(self.machine.job, self.links, self.drills, leadership)
        self._refused = 0
        self._done: asyncio.Future[int | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._awake_at = clock()
        self._serving: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def _recall(self) -> Past | None:
        if self.leadership is not None:
            return self.leadership.record.past
        # If it is not the whole story, though it may seem so, numbers of generations must be above all that there were.
        return replace(recall(self.events.read() if self.config.restarted else ()), floor=self._first_free_number())

    def _first_free_number(self) -> Generation:
        """An earlier coordinator of this job had an earlier time to begin with, and no new generation each millisecond."""
        return int(1000 * time.time())

    # What touches the machine is made here, so that the simulator can put something else in its place.

    def _make_events(self) -> EventLog:
        begun = self.leadership is not None and self.leadership.record.past.generation > 0
        return EventLog(Path(self.config.events_path), go_on=self.config.restarted or begun)

    def _make_machine(self, limits: Limits, past: Past | None) -> Coordinator:
        return Coordinator(limits, self.clock(), past)

    def _make_inquiry(self) -> Inquiry:
        history = self.config.node_history
        return Inquiry(self.events.write, Path(history) if history else None, self._handle_or_end)

    async def _open(self, sock: socket.socket) -> AsyncLink[Any]:
        return await accept_link(sock, control_codec(), self.config.token, self.config.timing.connect_s)

    async def run(self) -> int:
        """Serve until the job ends, as its only coordinator; the job's exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask_to_stop, number)
        listener = listen(self.config)
        accepting = loop.create_task(accept_all(listener, self.serve))
        try:
            code = await self.lead()
            assert code is not None, "nobody else leads"
            return code
        finally:
            accepting.cancel()
            listener.close()

    async def lead(self) -> int | None:
        """Decide until the job ends, and return its exit code, or until another coordinator leads: then None."""
        self._done = asyncio.get_running_loop().create_future()
        deadlines_s = {name: seconds for name, seconds, _ in self.config.timing.table()}
        log.info("deadlines, s: %s", ", ".join(f"{name} {seconds:g}" for name, seconds in deadlines_s.items()))
        started = {"restarted": self.config.restarted, "pid": os.getpid(), "deadlines_s": deadlines_s}
        if self.leadership is not None:
            started["term"] = self.leadership.term
        self.events.write("coordinator_started", started)
        working = self.begin()
        try:
            code = await self._done
            await self.inquiry.close()
            # The other tasks own the links: they end with them, after the last words.
            await asyncio.gather(*(link.flush(FLUSH_S) for link in self.links.values()), *self._leaving)
            await self._sign_off(code)
            return code
        finally:
            for task in working:
                task.cancel()
            if self._timer is not None:
                self._timer.cancel()
            for link in self.links.values():
                link.close()
            self.events.close()

    def begin(self) -> list[asyncio.Task[None]]:
        """Start what goes on beside the connections."""
        working = [self._start(self._pulse(), self._serving)]
        if self.leadership is not None and self.outbox is not None:
            working.append(self._start(self._keep(self.leadership), self._serving))
            working.append(self._start(self._proclaim(), self._serving))
            working.append(self._start(self._write(self.outbox), self._serving))
        self._set_timer()
        return working

    async def _proclaim(self) -> None:
        """An agent that hears nothing for a lease looks for another leader."""
        while True:
            await asyncio.sleep(self.config.timing.lease_beat_s)
            self._say_that_it_leads(self.links.values())

    async def _keep(self, leadership: Leadership) -> None:
        self.step_down(await leadership.keep())

    async def _write(self, outbox: Outbox) -> None:
        try:
            await outbox.run()
        except Deposed as error:
            self.step_down(str(error))

    def step_down(self, reason: str) -> None:
        """Decide nothing any more: another coordinator leads, or may soon."""
        if self._done is not None and not self._done.done():
            log.warning("this coordinator leads no more: %s", reason)
            self.events.write("coordinator_stepped_down", {"pid": os.getpid(), "reason": reason})
            self._done.set_result(None)

    async def _sign_off(self, code: int | None) -> None:
        """The other coordinators may leave as well, if the job has ended; else one of them may lead at once."""
        if self.leadership is None:
            return
        if code is not None:
            with contextlib.suppress(Deposed):
                await self.leadership.commit(self.leadership.record.past, told=True)
        await self.leadership.resign()

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

    def ask_to_stop(self, number: int) -> None:
        """End the job because of a signal."""
        self._handle(StopAsked(exit_code=128 + number, reason=f"stopped by signal {signal.Signals(number).name}"))

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connection that was accepted."""
        self._start(self._serve(sock, peer), self._serving)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """One agent's connection from handshake to end."""
        link: AsyncLink[Any] | None = None
        try:
            link = await self._open(sock)
            first = await asyncio.wait_for(link.receive(), self.config.timing.connect_s)
            if isinstance(first, (Drain, Inject)):
                await self.orders.obey(first, link)
                return
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
        self._say_that_it_leads([link])
        self._handle(FromNode(node=node, message=register))
        try:
            while True:
                self._receive(node, link, await link.receive())
        except PeerUnreachable as error:
            reason = str(error)
        except HotswapError as error:
            reason = f"refused: {error}"
            self._refuse(peer, str(error))
        self.drills.gone(node)
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
        elif isinstance(message, m.Struck):
            self.drills.hear(node, message)
        elif self.links.get(node) is link:
            self._handle(FromNode(node=node, message=message))

    def _say_that_it_leads(self, links: Iterable[AsyncLink[Any]]) -> None:
        if self.leadership is not None and self.leadership.holds:
            for link in links:
                link.send(m.Lead(term=self.leadership.term))

    def _answer(self, node: NodeId, generation: int, key: str, value: bytes) -> None:
        if node in self.links:
            self.links[node].send(m.KvValue(generation=generation, key=key, value=value))

    def _handle(self, event: Event) -> None:
        """Run one event through the machine and carry out what it says. Without its lease a coordinator decides nothing."""
        if self._done is not None and self._done.done():
            return
        if self.leadership is not None and not self.leadership.holds:
            self.step_down("the lease has run out")
            return
        effects = self.machine.handle(event, self.clock())
        if self.machine.membership is not None:
            self.rendezvous.advance(self.machine.membership.generation)
        if self.outbox is None:
            self._release(effects)
        else:
            self.outbox.put(effects)
        self._set_timer()

    def _release(self, effects: Sequence[Effect]) -> None:
        # First the log: a successor that reads it must not know less than somebody was told.
        for effect in effects:
            if isinstance(effect, Record):
                self._note(effect.event, effect.fields)
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

    def _note(self, event: str, fields: Mapping[str, Any]) -> None:
        self.events.write(event, fields)
        self.inquiry.saw(event, fields)

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
        halt_s=config.timing.halt_s,
        checkpoints=config.checkpoint_dir is not None,
        nodes_min=config.nodes_min,
        replicas=config.replicas,
        evict_slow=config.evict_slow,
        keep_groups=config.keep_groups,
    )


async def run_coordinator(config: CoordinatorConfig) -> int | None:
    """The job's exit code; None if this coordinator has left a job that goes on."""
    if config.store is None:
        return await CoordinatorServer(config).run()
    store = open_store(config.store, config.token, config.timing.store_s)
    return await Candidate(config, store, CoordinatorServer).run()


def main() -> int:
    """Entry point of ``python -m hotswap.node.coordinator``."""
    die_with_parent()
    set_up_logging()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoordinatorConfig)
    try:
        code = asyncio.run(run_coordinator(config))
    except OSError as error:
        said = {"error": f"cannot serve on {config.host}:{config.port}: {error}", "errno": error.errno}
        print(json.dumps(said), flush=True)
        return EXIT_REQUEUE
    except (UsageError, AuthError) as error:
        # The store refuses this coordinator: it would refuse the next one too.
        print(json.dumps({"warning": str(error)}), flush=True)
        code = EXIT_USAGE
    if code is None:
        return 128 + signal.SIGTERM
    # A line that a crash cannot print tells the launcher that the job has ended, and not just this process.
    print(json.dumps({"exit_code": code}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
