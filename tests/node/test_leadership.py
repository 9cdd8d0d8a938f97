"""Who leads, until when, and what a leader that is none any more can still do: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from hotswap.config import Timing
from hotswap.core import messages as m
from hotswap.core.events import Effect, Record, Send
from hotswap.core.past import Past
from hotswap.errors import EXIT_REQUEUE, HotswapError
from hotswap.node.leadership import CLOCK_MARGIN, Ballot, Deposed, Leader, Leadership, Outbox
from hotswap.store.memory import MemoryStore
from hotswap.store.port import Put, StoreUnavailable
from hotswap.store.table import Table

DEADLINE_S = 10.0


class Quick(Timing):
    """Leases that a test can wait for."""

    def __post_init__(self) -> None:
        pass

    @property
    def lease_s(self) -> float:
        return 1.0


class ShakyStore(MemoryStore):
    """Does not answer while it is ``away``."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.away = False

    async def keep(self, lease: int) -> float:
        self._require()
        return await super().keep(lease)

    async def commit(self, guards: Any, puts: Sequence[Put]) -> int | None:
        self._require()
        return await super().commit(guards, puts)

    async def revoke(self, lease: int) -> None:
        self._require()
        await super().revoke(lease)

    def _require(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


class Two:
    """Two ballots in one job, each with a store of its own."""

    def __init__(self) -> None:
        self.table = Table()
        self.stores = [ShakyStore(self.table) for _ in range(2)]
        self.ballots = [self.ballot(number) for number in range(2)]

    def ballot(self, number: int) -> Ballot:
        return Ballot(self.stores[number], "job", ("10.0.0.1", 100 + number), Quick(), time.monotonic)

    async def elect(self) -> Leadership:
        for ballot in self.ballots:
            await ballot.enter(restarted=False)
        found = await self.ballots[0].look()
        assert isinstance(found, Leadership)
        return found

    async def successor(self) -> Leadership:
        end = time.monotonic() + DEADLINE_S
        while not isinstance(found := await self.ballots[1].look(), Leadership):
            assert time.monotonic() < end, "nobody else can lead"
            await asyncio.sleep(0.01)
        return found


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 3 * DEADLINE_S))


def test_one_leads_and_the_other_knows_where() -> None:
    async def scenario() -> None:
        two = Two()
        first = await two.elect()
        assert first.term == 1 and first.holds
        assert await two.ballots[1].look() == Leader(term=1, host="10.0.0.1", port=100)
        await first.commit(Past(generation=3, started=True, plans=((1, 0), (3, 7))))
        await first.resign()
        assert not first.holds
        second = await two.ballots[1].look()
        assert isinstance(second, Leadership) and second.term == 2
        assert second.record.past == Past(generation=3, started=True, plans=((1, 0), (3, 7)))

    play(scenario())


def test_a_lease_that_is_kept_does_not_end() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        keeping = asyncio.create_task(leadership.keep())
        for _ in range(15):
            await asyncio.sleep(Quick().lease_s / 8)
            assert leadership.holds
            assert isinstance(await two.ballots[1].look(), Leader)
        keeping.cancel()

    play(scenario())


def test_a_leader_without_the_store_stops_before_another_one_can_lead() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        two.stores[0].away = True
        reason = await leadership.keep()
        assert "could not be renewed" in reason and not leadership.holds
        # Its key is still there: that is the margin for clocks that differ.
        assert isinstance(await two.ballots[1].look(), Leader)
        stopped_at = time.monotonic()
        assert (await two.successor()).term == 2
        assert time.monotonic() - stopped_at > CLOCK_MARGIN * Quick().lease_s / 2

    play(scenario())


def test_what_a_leader_of_an_earlier_term_decides_is_not_written() -> None:
    async def scenario() -> None:
        two = Two()
        first = await two.elect()
        second = await two.successor()  # Nobody has kept the first lease.
        await second.commit(Past(generation=5))
        first._until = float("inf")  # As if its own clock stood still.
        with pytest.raises(Deposed, match="another coordinator leads"):
            await first.commit(Past(generation=9))
        entry = await two.stores[0].get(two.ballots[0].job_key)
        assert entry is not None and b'"generation":5' in entry.value
        assert await first.keep() == "the lease has ended"

    play(scenario())


def test_a_decision_waits_for_the_store_but_not_longer_than_the_lease() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        two.stores[0].away = True
        writing = asyncio.create_task(leadership.commit(Past(generation=1)))
        await asyncio.sleep(0.1)
        two.stores[0].away = False
        await writing
        two.stores[0].away = True
        with pytest.raises(Deposed, match="ran out"):
            await leadership.commit(Past(generation=2))

    play(scenario())


def fact(generation: int) -> list[Effect]:
    record = Record(event="recovery_started", fields={"generation": generation})
    fence = m.Fence(generation=generation, places=(), endpoints={})
    return [record, Send(node="a#1", message=fence)]


HARMLESS: list[Effect] = [Record(event="step_committed", fields={"generation": 1, "step": 4})]


def test_nobody_hears_of_a_decision_before_it_is_written_and_all_leave_in_their_order() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        released: list[Effect] = []
        outbox = Outbox(leadership, released.extend)
        writing = asyncio.create_task(outbox.run())
        outbox.put(fact(1))
        outbox.put(HARMLESS)
        assert released == []
        while len(released) < 3:
            await asyncio.sleep(0.001)
        assert released == [*fact(1), *HARMLESS] and leadership.record.past.generation == 1
        outbox.put(HARMLESS)
        assert released[3:] == HARMLESS, "what rests on nothing new does not wait"
        released.clear()
        two.stores[0].away = True
        outbox.put(fact(2))
        outbox.put(HARMLESS)
        with pytest.raises(Deposed):
            await writing
        assert released == []

    play(scenario())


def test_a_run_that_has_ended_is_over_for_all_and_the_next_one_is_another() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        await leadership.commit(Past(generation=2, exit_code=3, reason="why"))
        assert isinstance(await two.ballots[1].look(), Leader), "not everybody knows yet"
        await leadership.commit(leadership.record.past, told=True)
        assert await two.ballots[1].look() == 3
        again = two.ballot(0)
        await again.enter(restarted=True)
        assert await again.look() == 3, "one that was only started again is of the run that has ended"
        await leadership.resign()
        fresh = two.ballot(0)
        await fresh.enter(restarted=False)
        led = await fresh.look()
        assert isinstance(led, Leadership) and led.term == 2 and led.record.past == Past()
        assert await two.ballots[1].look() == 3, "who was left over hears how its own run ended"
        await led.commit(Past(exit_code=0), told=True)
        await two.ballot(1).enter(restarted=False)
        assert await two.ballots[1].look() == EXIT_REQUEUE, "of a run long past nothing is known"

    play(scenario())


def test_a_leader_that_ended_the_job_and_died_leaves_the_rest_to_the_next_one() -> None:
    async def scenario() -> None:
        two = Two()
        leadership = await two.elect()
        await leadership.commit(Past(generation=2, exit_code=75, reason="nothing left"))
        found = await two.successor()
        assert (found.record.past.exit_code, found.record.told) == (75, False)

    play(scenario())


def test_keys_of_something_else_are_not_taken_for_hotswaps() -> None:
    async def scenario() -> None:
        two = Two()
        await two.stores[0].commit({}, [Put(key="/hotswap/job/job", value=b"[]")])
        with pytest.raises(HotswapError, match="something else than hotswap's JobRecord"):
            await two.ballots[0].enter(restarted=False)

    play(scenario())
