"""The coordinator's process: the real server around the real machine, on a loop in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from hotswap.config import CoordinatorConfig
from hotswap.core.coordinator import Coordinator, Limits
from hotswap.core.events import Effect, Event, Judged
from hotswap.core.past import Past
from hotswap.core.types import Generation
from hotswap.node.coordinator import CoordinatorServer
from hotswap.node.eventlog import EventLog
from hotswap.node.inquiry import Inquiry
from hotswap.node.leadership import Leadership
from hotswap.sim.chronicle import Violation
from hotswap.sim.process import ProcessLoop

if TYPE_CHECKING:
    from hotswap.sim.job import JobModel


class ObservedCoordinator(Coordinator):
    """The real machine; its phases are moments for faults."""

    job_model: JobModel

    def handle(self, event: Event, now: float) -> list[Effect]:
        """As in production."""
        before = self.phase
        effects = super().handle(event, now)
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

    async def close(self) -> None:
        """Nothing to wait for."""


class ServerModel(CoordinatorServer):
    """Real, but for sockets and files."""

    def __init__(
        self,
        job: JobModel,
        loop: ProcessLoop,
        config: CoordinatorConfig,
        clock: Callable[[], float],
        leadership: Leadership | None = None,
    ) -> None:
        """*config* says whether there was one before."""
        self._job = job
        self.loop = loop
        super().__init__(config, clock, leadership)
        if leadership is not None and not job.setup.lease:
            leadership._until = float("inf")

    def _make_machine(self, limits: Limits, past: Past | None) -> Coordinator:
        self._job.world.note(f"{self.loop.name} starts with {past}")
        if past is not None:
            self._job.note_past(past)
        machine = ObservedCoordinator(limits, self.clock(), past)
        machine.job_model = self._job
        return machine

    def _first_free_number(self) -> Generation:
        return int(1000 * self._job.world.now)

    def _release(self, effects: Sequence[Effect]) -> None:
        """Whatever is let out is judged before anybody hears of it."""
        try:
            self._job.observe(self, effects)
        except Violation as violation:
            # Here it would be taken for the production code's own error, and come too late if the job has just ended.
            self._job.world.fail(violation)
        super()._release(effects)

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
        self.begin()

    def _crash_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    def _ended(self, done: asyncio.Future[int | None]) -> None:
        if (error := done.exception()) is not None:
            self.loop.fail(error)
