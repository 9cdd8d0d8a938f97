"""Which of several coordinators leads: a lease in a store, and what a leader may do only while it has it.

Two keys for each job: ``leader`` goes with the leader's lease, ``job`` stays. A leader writes to ``job`` only under the guard that
``leader`` is still what it wrote when it was elected. So whatever is in ``job`` was decided by whoever led then, and once another
one is elected nothing of an earlier leader can get in any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from hotswap.config import Timing
from hotswap.core.events import Effect, Record
from hotswap.core.past import Past
from hotswap.errors import EXIT_REQUEUE, HotswapError
from hotswap.store.port import ABSENT, Put, Store, StoreUnavailable

log = logging.getLogger("hotswap.leader")
T = TypeVar("T")
CLOCK_MARGIN = 0.2
"""Share of a lease that its owner does not use: so much may the store's clock run faster than its own."""


class Deposed(HotswapError):
    """This coordinator does not lead any more; what it would decide now counts for nothing."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Value of the key ``leader``: who leads since *term*, and where agents reach it."""

    term: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Value of the key ``job``. ``term``: the newest, also over the runs of a job.

    ``run``: a job that has ended and is started again under its name is another run. ``told``: every agent that could be
    reached knows that this run has ended. ``previous``: exit code of the run before.
    """

    run: int = 1
    term: int = 0
    past: Past = field(default_factory=Past)
    told: bool = False
    previous: int = EXIT_REQUEUE


class Leadership:
    """One term. ``record`` is what the store holds of the job."""

    def __init__(
        self, ballot: Ballot, leader: Leader, record: JobRecord, *, revision: int, lease: int, until: float
    ) -> None:
        """*until*: the lease lasts so long by this process' clock, its margin taken off."""
        self.term = leader.term
        self.record = record
        self._ballot = ballot
        self._guards = {ballot.leader_key: revision}
        self._lease = lease
        self._until = until

    @property
    def holds(self) -> bool:
        """Whether no other coordinator can lead yet."""
        return self._ballot.clock() < self._until

    async def keep(self) -> str:
        """Renew the lease again and again; the reason why it is lost, as soon as it is."""
        ballot = self._ballot
        while True:
            await asyncio.sleep(min(ballot.timing.lease_beat_s, max(0.0, self._until - ballot.clock())))
            asked_at = ballot.clock()
            try:
                ttl_s = await asyncio.wait_for(ballot.store.keep(self._lease), max(0.0, self._until - asked_at))
            except (StoreUnavailable, asyncio.TimeoutError) as error:
                if not self.holds:
                    return f"the lease could not be renewed: {str(error) or 'no answer in time'}"
                log.warning("the lease is not renewed: %s", error)
                continue
            if ttl_s <= 0:
                return "the lease has ended"
            if not self.holds:
                return "this process did not run for so long that the lease may have passed to another"
            self._until = max(self._until, asked_at + ttl_s * (1 - CLOCK_MARGIN))

    async def commit(self, past: Past, *, told: bool = False) -> None:
        """Have *past* in the store before anybody hears of it. Deposed if that is not this coordinator's to say any more."""
        ballot, record = self._ballot, replace(self.record, past=past, told=told)
        while self.holds:
            try:
                revision = await ballot.store.commit(self._guards, [Put(key=ballot.job_key, value=_encoded(record))])
            except StoreUnavailable as error:
                log.warning("a decision has to wait: %s", error)
                await asyncio.sleep(ballot.timing.lease_beat_s)
                continue
            if revision is None:
                raise Deposed("another coordinator leads")
            self.record = record
            return
        raise Deposed("the lease ran out before a decision was in the store")

    async def resign(self) -> None:
        """Let another one lead at once."""
        self._until = float("-inf")
        try:
            await self._ballot.store.revoke(self._lease)
        except StoreUnavailable as error:
            log.warning("the lease will run out by itself: %s", error)


class Ballot:
    """One coordinator's way to become the leader."""

    def __init__(
        self, store: Store, job_id: str, address: tuple[str, int], timing: Timing, clock: Callable[[], float]
    ) -> None:
        """*address*: where agents reach this coordinator."""
        self.store = store
        self.timing = timing
        self.clock = clock
        self.leader_key, self.job_key = f"/hotswap/{job_id}/leader", f"/hotswap/{job_id}/job"
        self._address = address
        self._run = 0

    async def enter(self, *, restarted: bool) -> None:
        """Join the job's run that is under way, or begin the next one.

        *restarted*: this coordinator has been there before, so a run that has ended is its own.
        """
        entry = await self.store.get(self.job_key)
        if entry is None:
            record, guard = JobRecord(), ABSENT
        else:
            record, guard = _decoded(entry.value, JobRecord), entry.revision
            if record.past.exit_code is None or restarted:
                self._run = record.run
                return
            record = JobRecord(run=record.run + 1, term=record.term, previous=record.past.exit_code)
        if await self.store.commit({self.job_key: guard}, [Put(key=self.job_key, value=_encoded(record))]) is None:
            await self.enter(restarted=True)  # Somebody else has begun it.
        else:
            self._run = record.run

    async def look(self) -> Leader | Leadership | int:
        """Who leads; this coordinator's own leadership if nobody else did; the exit code of a run that is over."""
        entry = await self.store.get(self.job_key)
        record = _decoded(entry.value, JobRecord) if entry is not None else JobRecord()
        if record.run != self._run:
            return record.previous if record.run == self._run + 1 else EXIT_REQUEUE
        if record.told and record.past.exit_code is not None:
            return record.past.exit_code
        leading = await self.store.get(self.leader_key)
        if leading is not None:
            return _decoded(leading.value, Leader)
        elected = await self._stand(record, entry.revision if entry is not None else ABSENT)
        return elected or Leader(term=record.term, host="", port=0)

    async def _stand(self, record: JobRecord, guard: int) -> Leadership | None:
        asked_at = self.clock()
        grant = await self.store.grant(self.timing.lease_s)
        host, port = self._address
        leader = Leader(term=record.term + 1, host=host, port=port)
        record = replace(record, term=leader.term)
        puts = [
            Put(key=self.leader_key, value=_encoded(leader), lease=grant.lease),
            Put(key=self.job_key, value=_encoded(record)),
        ]
        revision = await self.store.commit({self.leader_key: ABSENT, self.job_key: guard}, puts)
        if revision is None:
            await self.store.revoke(grant.lease)
            return None
        until = asked_at + grant.ttl_s * (1 - CLOCK_MARGIN)
        return Leadership(self, leader, record, revision=revision, lease=grant.lease, until=until)


class Outbox:
    """Holds back what a leader has decided until the store has what it rests on. Everything leaves in its order."""

    def __init__(self, leadership: Leadership, release: Callable[[Sequence[Effect]], None]) -> None:
        """*release* carries effects out."""
        self._leadership = leadership
        self._release = release
        self._past = leadership.record.past
        self._held: list[Sequence[Effect]] = []
        self._wake = asyncio.Event()

    def put(self, effects: Sequence[Effect]) -> None:
        """Carry *effects* out, at once if nothing has to be written before them."""
        past = self._past
        for effect in effects:
            if isinstance(effect, Record):
                past = past.after(effect.event, effect.fields)
        if past == self._past and not self._held:
            self._release(effects)
            return
        self._past = past
        self._held.append(effects)
        self._wake.set()

    async def run(self) -> None:
        """Write and release. Deposed when another one leads."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # All at once: the store may know more than anybody was told, never less.
            count, past = len(self._held), self._past
            if past != self._leadership.record.past:
                await self._leadership.commit(past)
            if not self._leadership.holds:
                raise Deposed("the lease ran out while a decision was written")
            for _ in range(count):
                self._release(self._held[0])
                del self._held[0]
            if self._held:
                self._wake.set()


def _encoded(value: Leader | JobRecord) -> bytes:
    return msgspec.json.encode(value)


def _decoded(value: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        raise HotswapError(f"the store holds something else than hotswap's {kind.__name__}: {error}") from None
