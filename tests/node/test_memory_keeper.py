"""Snapshots on their way through the memory of two nodes."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from agent_kit import play, settings, until

from hotswap.config import Timing
from hotswap.core.messages import Plan
from hotswap.core.types import Endpoint, HeldKind, Source, SourceKind
from hotswap.errors import HotswapError, PeerFault
from hotswap.node.memory_keeper import MemoryKeeper
from hotswap.replication.buffers import Located
from hotswap.replication.sections import SectionKind
from hotswap.wire import worker_messages as w

NOWHERE = Endpoint(host="127.0.0.1", port=1)


@dataclass(kw_only=True)
class Node:
    keeper: MemoryKeeper
    acked: list[tuple[int, int, int]] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)

    def snapshot(self, slot: int, step: int, unique: bytes, shared: bytes = b"", generation: int = 1) -> None:
        """As a worker does it."""
        keeper = self.keeper
        keeper.vault.reserve(slot, len(unique) + len(shared), 2)
        buffer = keeper.free(slot)
        keeper.snapshot_begin(slot, buffer)
        keeper.buffers(slot)[buffer].view()[: len(shared) + len(unique)] = shared + unique
        done = w.SnapshotDone(
            generation=generation, step=step, buffer=buffer, shared_nbytes=len(shared), unique_nbytes=len(unique)
        )
        keeper.snapshot_done(slot, done)

    async def fetch(self, slot: int, source: Source, step: int) -> Located | None:
        """As an agent does it for a worker that has no memory yet."""
        await self.keeper.prepare(slot, source, [])
        return await self.keeper.locate(slot, source, step)

    def held(self, kind: HeldKind) -> set[tuple[int, int]]:
        return {(item.slot, item.step) for item in self.keeper.inventory() if item.kind is kind}

    def read(self, slot: int, buffer: int, nbytes: int) -> bytes:
        return bytes(self.keeper.buffers(slot)[buffer].view()[:nbytes])


def plan(step: int = 0, *, holders: dict[int, tuple[str, ...]], push: tuple[int, ...] = ()) -> Plan:
    return Plan(
        generation=1, resume_step=step, sources={}, holders=holders, push={slot: holders[slot] for slot in push}
    )


@asynccontextmanager
async def nodes(directory: Path, budget_s: float = 5.0) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes in generation 1; each keeps the replica of the other one's slot."""
    made: dict[str, Node] = {}

    def make(name: str) -> None:
        def on_acked(slot: int, generation: int, step: int, free: int) -> None:
            made[name].acked.append((slot, generation, step))

        def on_stalled(slot: int, generation: int, detail: str) -> None:
            made[name].stalled.append(detail)

        config = settings(directory, node=name, timing=Timing(detection_budget_s=budget_s))
        keeper = MemoryKeeper(config, f"{name}#1", on_acked, on_stalled, lambda *_: None, lambda _: None)
        made[name] = Node(keeper=keeper)
        keeper.start()

    make("a")
    make("b")
    try:
        for node in made.values():
            node.keeper.endpoints = {f"{name}#1": other.keeper.endpoint for name, other in made.items()}
            node.keeper.fence(1)
            node.keeper.adopt_plan(plan(holders={0: ("b#1",), 1: ("a#1",)}))
        yield made["a"], made["b"]
    finally:
        for node in made.values():
            node.keeper.close()


def test_a_snapshot_reaches_its_holder_and_is_acknowledged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 3, b"unique", shared=b"shared")
            await until(lambda: a.acked == [(0, 1, 3)])
            assert b.held(HeldKind.REPLICA) == {(0, 3)} and a.held(HeldKind.OWN) == {(0, 3)}
            assert a.keeper.all_acked(3, [0]) and not a.keeper.all_acked(4, [0])
            with b.keeper.vault.open(0, 3, SectionKind.UNIQUE) as lease:
                assert bytes(lease.view) == b"unique"

    play(scenario())


def test_without_a_holder_the_own_copy_suffices(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.keeper.adopt_plan(plan(holders={}))
            a.snapshot(0, 1, b"x")
            await until(lambda: a.acked == [(0, 1, 1)])

    play(scenario())


def test_a_push_of_an_ended_generation_is_never_acknowledged_in_the_next_one(tmp_path: Path) -> None:
    """Between the snapshot and the first step of its push there may be a fence."""

    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 1, b"x")
            for node in (a, b):
                node.keeper.fence(2)
            await asyncio.sleep(0.2)
            assert a.acked == [] and a.keeper.acked == {}

    play(scenario())


def test_a_snapshot_of_an_ended_generation_does_not_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.keeper.fence(2)
            a.snapshot(0, 1, b"x", generation=1)
            assert a.held(HeldKind.OWN) == set()

    play(scenario())


def test_a_holder_that_cannot_be_reached_is_reported_once_in_each_budget(tmp_path: Path) -> None:
    """Again and again: the first time there may have been no coordinator."""

    async def scenario() -> None:
        async with nodes(tmp_path, budget_s=0.5) as (a, b):
            a.keeper.endpoints = {"b#1": NOWHERE}
            a.snapshot(0, 1, b"x")
            await asyncio.sleep(0.3)
            assert a.stalled == []
            await until(lambda: a.stalled)
            await asyncio.sleep(0.2)
            assert len(a.stalled) == 1 and "slot 0 at step 1 to b#1" in a.stalled[0]
            await until(lambda: len(a.stalled) == 2)
            # Whoever reports does not give up.
            a.keeper.endpoints = {"b#1": b.keeper.endpoint}
            await until(lambda: a.acked == [(0, 1, 1)])

    play(scenario())


def test_after_a_restore_only_what_the_holder_lacks_is_pushed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 1, b"x")
            await until(lambda: a.acked)
            for node in (a, b):
                node.keeper.fence(2)
            for push, where in (({}, "there"), ({0: ("b#1",)}, "pushed")):
                made = Plan(generation=2, resume_step=1, sources={}, holders={0: ("b#1",)}, push=push)
                a.keeper.adopt_plan(made)
                b.keeper.adopt_plan(made)
                if where == "pushed":
                    b.keeper.vault.forget(0, HeldKind.REPLICA)
                a.keeper.acked.clear()
                a.acked.clear()
                a.keeper.ensure_replicated(0, 1, made)
                await until(lambda: a.acked == [(0, 2, 1)])
                assert b.held(HeldKind.REPLICA) == {(0, 1)}

    play(scenario())


def test_a_push_under_way_is_not_started_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            made = plan(holders={0: ("b#1",)}, push=(0,))
            a.keeper.adopt_plan(made)
            a.snapshot(0, 0, b"x")
            a.keeper.ensure_replicated(0, 0, made)
            await until(lambda: a.acked)
            await asyncio.sleep(0.1)
            a.keeper.ensure_replicated(0, 0, made)
            await asyncio.sleep(0.1)
            assert a.acked == [(0, 1, 0)]

    play(scenario())


def test_a_plan_that_comes_late_drops_nothing_of_its_own_generation(tmp_path: Path) -> None:
    """Replicas come on connections of their own, and may be there before the plan of the generation that they are of."""

    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for step in (1, 2):
                a.snapshot(0, step, b"x")
                await until(lambda step=step: (0, 1, step) in a.acked)
            late = Plan(generation=2, resume_step=1, sources={}, holders={0: ("b#1",)}, push={})
            for keeper in (a.keeper, b.keeper):
                keeper.fence(2)
            a.keeper.adopt_plan(late)
            a.snapshot(0, 2, b"y", generation=2)
            await until(lambda: (0, 2, 2) in a.acked)
            b.keeper.adopt_plan(late)
            b.keeper.undo_after(1)
            assert b.held(HeldKind.REPLICA) == {(0, 1), (0, 2)}

    play(scenario())


def test_a_plan_drops_the_undone_future_and_go_what_others_have_now(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for step in (1, 2):
                a.snapshot(0, step, b"x")
                await until(lambda step=step: (0, 1, step) in a.acked)
            assert a.held(HeldKind.OWN) == b.held(HeldKind.REPLICA) == {(0, 1), (0, 2)}
            for node in (a, b):
                node.keeper.fence(2)
            undo = replace(plan(1, holders={0: ("b#1",)}), generation=2)
            a.keeper.adopt_plan(undo)
            b.keeper.adopt_plan(undo)
            assert a.held(HeldKind.OWN) == b.held(HeldKind.REPLICA) == {(0, 1)}
            for node in (a, b):
                node.keeper.adopt_plan(plan(1, holders={0: ("c#1",)}))
                assert node.held(HeldKind.OWN) | node.held(HeldKind.REPLICA) == {(0, 1)}, (
                    "somebody may have to restore from it"
                )
            a.keeper.forget_moved([0])
            assert a.held(HeldKind.OWN) == {(0, 1)}
            a.keeper.forget_moved([])
            b.keeper.forget_moved([])
            assert a.held(HeldKind.OWN) == b.held(HeldKind.REPLICA) == set()

    play(scenario())


@pytest.mark.parametrize("rehearsed", [False, True])
def test_what_all_agreed_on_last_outlives_a_move_until_they_agree_again(tmp_path: Path, rehearsed: bool) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for step in (1, 2):
                a.snapshot(0, step, b"unique", shared=b"shared")
                await until(lambda step=step: (0, 1, step) in a.acked)
            for node in (a, b):
                node.keeper.agreement.comparing(1, -1)
                node.keeper.agreed(1)
                node.keeper.fence(2)
                node.keeper.adopt_plan(replace(plan(2, holders={0: ("d#1",)}), generation=2))
                node.keeper.agreed(1)
                assert node.held(HeldKind.OWN) | node.held(HeldKind.REPLICA) == {(0, 1), (0, 2)}, "not before Go"
                node.keeper.forget_moved([])
                assert node.held(HeldKind.OWN) | node.held(HeldKind.REPLICA) == {(0, 1)}
            # The slot comes back, and its new worker has no memory yet, or too little of it.
            if rehearsed:
                await a.keeper.reserve(0, 4, 2)
            located = await a.fetch(0, Source(kind=SourceKind.OWN), 1)
            assert located is not None
            assert a.read(0, located.buffer, 12) == b"sharedunique"
            for node in (a, b):
                node.keeper.agreed(4)
                assert node.held(HeldKind.REPLICA) == set()
            assert b.keeper.vault.bytes_reserved == 0

    play(scenario())


def test_a_plan_that_goes_back_further_undoes_what_was_agreed_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.keeper.agreed(5)
            a.keeper.fence(2)
            a.keeper.adopt_plan(replace(plan(3, holders={}), generation=2))
            assert a.keeper.agreement.step == 3
            a.keeper.undo_after(2)
            assert a.keeper.agreement.step == 2

    play(scenario())


# --- locate ------------------------------------------------------------------------------------------------------------


def replica(unique_from: str, unique: int, shared_from: str = "", shared_slot: int = -1, shared: int = 0) -> Source:
    return Source(
        kind=SourceKind.REPLICA,
        unique_from=unique_from,
        unique_nbytes=unique,
        shared_from=shared_from,
        shared_slot=shared_slot,
        shared_nbytes=shared,
    )


def test_own_state_is_where_it_was_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.snapshot(0, 1, b"unique", shared=b"shared")
            for kind in (SourceKind.LIVE, SourceKind.OWN):
                located = await a.keeper.locate(0, Source(kind=kind), 1)
                assert located is not None
                assert a.read(0, located.buffer, 12) == b"sharedunique"
            for kind in (SourceKind.FRESH, SourceKind.CHECKPOINT):
                assert await a.keeper.locate(0, Source(kind=kind), 1) is None
            assert await a.keeper.locate(0, Source(kind=SourceKind.LIVE), 7) is None

    play(scenario())


def test_own_state_in_memory_that_was_replaced_is_moved(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.snapshot(0, 1, b"unique", shared=b"shared")
            await a.keeper.reserve(0, 10_000, 2)
            located = await a.keeper.locate(0, Source(kind=SourceKind.OWN), 1)
            assert located is not None
            assert a.read(0, located.buffer, 12) == b"sharedunique"
            assert a.keeper.buffers(0)[located.buffer].nbytes >= 10_000

    play(scenario())


def test_lost_state_comes_from_the_holder_and_a_peer(tmp_path: Path) -> None:
    """Slot 0 was on a node that is gone; b holds its unique part, slot 1 on b has the same shared part."""

    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 4, b"unique", shared=b"shared")
            await until(lambda: a.acked)
            b.snapshot(1, 4, b"other!", shared=b"shared")
            a.keeper.vault.forget(0, HeldKind.OWN)
            located = await a.fetch(0, replica("b#1", 6, "b#1", 1, 6), 4)
            assert located is not None
            assert a.read(0, located.buffer, 12) == b"sharedunique"
            assert a.held(HeldKind.OWN) == {(0, 4)}

    play(scenario())


def test_lost_state_whose_replica_is_on_this_node_needs_no_network(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 4, b"unique")
            await until(lambda: a.acked)
            b.keeper.endpoints = {}
            located = await b.fetch(0, replica("b#1", 6), 4)
            assert located is not None and b.read(0, located.buffer, 6) == b"unique"

    play(scenario())


def test_a_holder_that_is_out_of_reach_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 4, b"unique")
            await until(lambda: a.acked)
            a.keeper.vault.forget(0, HeldKind.OWN)
            a.keeper.endpoints = {"b#1": NOWHERE}
            locating = asyncio.ensure_future(a.fetch(0, replica("b#1", 6), 4))
            await asyncio.sleep(0.2)
            a.keeper.endpoints = {"b#1": b.keeper.endpoint}
            located = await locating
            assert located is not None and a.read(0, located.buffer, 6) == b"unique"

    play(scenario())


@pytest.mark.parametrize("why", ["unknown address", "nobody there", "not held"])
def test_a_fetch_that_fails_leaves_nothing_half_done(tmp_path: Path, why: str) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, budget_s=0.5) as (a, b):
            a.keeper.endpoints = {} if why == "unknown address" else {"b#1": NOWHERE}
            if why == "not held":
                a.keeper.endpoints = {"b#1": b.keeper.endpoint}
            with pytest.raises(PeerFault if why != "not held" else HotswapError):
                await asyncio.wait_for(a.fetch(0, replica("b#1", 6), 4), 60)
            assert a.held(HeldKind.OWN) == set()
            a.snapshot(0, 5, b"next")
            assert a.held(HeldKind.OWN) == {(0, 5)}

    play(scenario())


def test_what_a_thread_finishes_after_a_fence_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, _):
            a.snapshot(0, 4, b"unique")
            await until(lambda: a.acked)
            a.keeper.vault.forget(0, HeldKind.OWN)
            begun, go_on = threading.Event(), threading.Event()
            real = MemoryKeeper._take

            def slow(self: MemoryKeeper, *args: Any) -> Any:
                begun.set()
                assert go_on.wait(10)
                return real(self, *args)

            monkeypatch.setattr(MemoryKeeper, "_take", slow)
            fetching = asyncio.create_task(a.fetch(0, replica("b#1", 6), 4))
            await until(begun.is_set)
            a.keeper.fence(2)
            go_on.set()
            with pytest.raises(HotswapError):
                await fetching
            assert a.held(HeldKind.OWN) == set()

    play(scenario())


def test_nothing_is_left_when_it_is_closed(tmp_path: Path) -> None:
    def traces() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    async def scenario() -> None:
        before = traces()
        async with nodes(tmp_path) as (a, _):
            for step in range(20):
                a.snapshot(0, step, b"x" * 1000)
                await until(lambda step=step: (0, 1, step) in a.acked)
        await until(lambda: traces() <= before)

    play(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_announced_once_it_counts(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    def commit(directory: Path, step: int, generations: dict[int, int]) -> None:
        happened.append(("commit", directory, step, generations))
        if fails:
            raise OSError(errno.ENOSPC, "no space left")

    async def scenario() -> None:
        config = settings(tmp_path, node="a", checkpoint_dir=str(tmp_path / "durable"))
        ignore = lambda *_: None  # noqa: E731
        keeper = MemoryKeeper(config, "a#1", ignore, ignore, ignore, happened.append)
        keeper.start()
        keeper.checkpoints.commit(7, {0: 1, 1: 2})
        while keeper._tasks:
            await asyncio.wait(keeper._tasks)
        keeper.close()

    monkeypatch.setattr("hotswap.node.checkpoints.durable_index.commit", commit)
    asyncio.run(scenario())
    assert happened == [("commit", tmp_path / "durable", 7, {0: 1, 1: 2}), *([] if fails else [7])]


class Writers:
    """Processes that write checkpoints, which end when the test says so."""

    def __init__(self) -> None:
        self.running: list[Callable[[int], None]] = []

    def call(
        self, target: str, args: list[Any], fds: list[int], fd_names: list[str], done: Callable[[int], None]
    ) -> None:
        self.running.append(done)


@asynccontextmanager
async def with_storage(directory: Path, written: list[tuple[int, int, int]]) -> AsyncIterator[Node]:
    """A node without a holder for its slot 0, of which steps 1 and 2 are here, in three buffers."""
    config = settings(directory, node="a", checkpoint_dir=str(directory / "durable"), checkpoint_interval_steps=1)
    ignore = lambda *_: None  # noqa: E731
    keeper = MemoryKeeper(config, "a#1", ignore, ignore, lambda *shard: written.append(shard), ignore)
    keeper.start()
    keeper.fence(1)
    keeper.adopt_plan(plan(holders={}))
    keeper.vault.reserve(0, 1, 3)
    node = Node(keeper=keeper)
    for step in (1, 2):
        node.snapshot(0, step, b"x")
    try:
        yield node
    finally:
        keeper.close()


def test_a_checkpoint_of_the_newest_snapshot_waits_for_the_one_before(tmp_path: Path) -> None:
    written: list[tuple[int, int, int]] = []

    async def scenario() -> None:
        writers = Writers()
        async with with_storage(tmp_path, written) as a:
            a.keeper.checkpoints.write(0, 1, 1, writers.call)
            a.keeper.checkpoints.write(0, 2, 1, writers.call)
            assert len(writers.running) == 1, "two pins would leave the worker too little to write to"
            writers.running[0](0)
            await until(lambda: len(writers.running) == 2)
            writers.running[1](0)
        assert written == [(0, 1, 1), (0, 2, 1)]

    play(scenario())


def test_a_snapshot_is_not_written_by_two_at_once(tmp_path: Path) -> None:
    written: list[tuple[int, int, int]] = []

    async def scenario() -> None:
        writers = Writers()
        async with with_storage(tmp_path, written) as a:
            for _ in range(2):
                a.keeper.checkpoints.write(0, 2, 1, writers.call)
            assert len(writers.running) == 1
            writers.running[0](1)
            await until(lambda: len(writers.running) == 2)

    play(scenario())


@pytest.mark.parametrize("why", ["a newer snapshot", "a new generation", "it is gone"])
def test_what_may_be_overwritten_is_not_waited_for(tmp_path: Path, why: str) -> None:
    written: list[tuple[int, int, int]] = []

    async def scenario() -> None:
        writers = Writers()
        async with with_storage(tmp_path, written) as a:
            a.keeper.checkpoints.write(0, 1, 1, writers.call)
            a.keeper.checkpoints.write(0, 2, 1, writers.call)
            if why == "a newer snapshot":
                a.snapshot(0, 3, b"x")
            elif why == "a new generation":
                a.keeper.fence(2)
            else:
                a.keeper.vault.truncate(0, 1, before=2)
            writers.running[0](0)
            await until(lambda: not a.keeper._tasks)
            assert len(writers.running) == 1

    play(scenario())


def test_storage_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    asked: list[Path] = []

    def latest(directory: Path) -> int:
        asked.append(directory)
        answers.wait(10.0)
        if len(asked) > 1:
            raise OSError(errno.EIO, "input/output error")
        return 7

    async def scenario() -> None:
        timing = Timing(detection_budget_s=0.5)
        keeper = MemoryKeeper(
            settings(tmp_path, node="a", checkpoint_dir=str(tmp_path), timing=timing), "a#1", *[lambda *_: None] * 4
        )
        await keeper.checkpoints.find()
        await keeper.checkpoints.find()
        assert keeper.checkpoints.step is None and len(asked) == 1, "asked again before it has answered"
        answers.set()
        await keeper.checkpoints.find()
        assert keeper.checkpoints.step == 7
        await keeper.checkpoints.find()
        assert keeper.checkpoints.step == 7, "what was there a moment ago is the best guess"

    monkeypatch.setattr("hotswap.node.checkpoints.durable_index.latest", latest)
    asyncio.run(scenario())


def test_a_snapshot_is_acknowledged_once_all_its_holders_have_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            both = plan(holders={0: ("b#1", "c#1")})
            a.keeper.adopt_plan(both)
            a.snapshot(0, 3, b"unique")
            await until(lambda: b.held(HeldKind.REPLICA) == {(0, 3)})
            assert a.acked == [], "the other holder has no address yet"
            a.keeper.endpoints = {**a.keeper.endpoints, "c#1": a.keeper.endpoints["b#1"]}
            await until(lambda: a.acked == [(0, 1, 3)])

    play(scenario())


def test_after_a_restore_only_the_holder_that_lacks_it_gets_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            a.snapshot(0, 1, b"x")
            await until(lambda: a.acked)
            for node in (a, b):
                node.keeper.fence(2)
            holders = {0: ("b#1", "nobody#1")}
            made = Plan(generation=2, resume_step=1, sources={}, holders=holders, push={0: ("b#1",)})
            a.keeper.adopt_plan(made)
            b.keeper.vault.forget(0, HeldKind.REPLICA)
            a.acked.clear()
            a.keeper.ensure_replicated(0, 1, made)
            await until(lambda: a.acked == [(0, 2, 1)])
            assert b.held(HeldKind.REPLICA) == {(0, 1)}

    play(scenario())
