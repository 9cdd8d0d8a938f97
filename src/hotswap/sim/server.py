"""The coordinator's process: the real server around the real machine, on a loop in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from hotswap.config import CoordinatorConfig
from hotswap.core.coordinator import Coordinator
from hotswap.core.events import Effect, Event, Judged
from hotswap.core.past import recall
from hotswap.node.coordinator import CoordinatorServer, limits_of
from hotswap.node.eventlog import EventLog
from hotswap.node.inquiry import Inquiry
from hotswap.sim.chronicle import Violation
from hotswap.sim.network import Link
from hotswap.sim.process import ProcessLoop

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel


class ObservedCoordinator(Coordinator):
    """The real machine; whatever it says is judged at once."""

    job_model: JobModel

    def handle(self, event: Event, now: float) -> list[Effect]:
        """As in production."""
        before = self.phase
        effects = super().handle(event, now)
        try:
            self.job_model.observe(effects)
        except Violation as violation:
            # Here it would be taken for the production code's own error, and come too late if the job has just ended.
            self.job_model.world.fail(violation)
        if self.phase is not before:
            self.job_model.moment(self.phase.value)
        return effects


class EventsModel(EventLog):
    """An event log in memory, which may be gone when a coordinator starts again."""

    def __init__(self, log: list[dict[str, Any]]) -> None:
        """*log*: all of it so far."""
        self._log = log

    def read(self) -> Iterator[dict[str, Any]]:
        """What is in the log."""
        return iter(self._log)

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one event."""
        self._log.append({"event": event, **fields})

    def close(self) -> None:
        """Nothing to close."""


class NoInquiry:
    """Nobody asks what broke: the faults are known."""

    def saw(self, event: str, fields: Mapping[str, Any]) -> None:
        """An event of the job."""

    def hear(self, node: str, message: Any) -> None:
        """Evidence."""


class ServerModel(CoordinatorServer):
    """Real, but for sockets and files."""

    def __init__(self, job: JobModel, loop: ProcessLoop, config: CoordinatorConfig) -> None:
        """*config* says whether there was one before."""
        self._job = job
        self.loop = loop
        super().__init__(config, loop.time)
        past = recall(self.events.read()) if config.restarted else None
        self.machine = ObservedCoordinator(limits_of(config), loop.time(), past)
        self.machine.job_model = job
        job.world.note(f"a coordinator starts with {past}")

    def _make_events(self) -> EventLog:
        return EventsModel(self._job.log)

    def _make_inquiry(self) -> Inquiry:
        return cast(Inquiry, NoInquiry())

    async def _open(self, sock: Any) -> Any:
        return sock

    def take_advice(self, judged: Judged) -> None:
        """A verdict has come from somewhere."""
        self._handle(judged)

    def start(self) -> None:
        """The beginning of ``run``."""
        self._done = self.loop.create_future()
        self._done.add_done_callback(self._ended)
        self._start(self._pulse(), self._serving)
        self._set_timer()

    def accept(self, link: Link) -> None:
        """An agent has connected."""
        self._start(self._serve(cast(Any, link), link.peer.loop.name), self._serving)

    def _crash_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    def _ended(self, done: asyncio.Future[int]) -> None:
        if (error := done.exception()) is not None:
            self.loop.fail(error)
