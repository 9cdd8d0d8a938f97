"""What an agent says and does when the coordinator and its workers say and do things to it."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from agent_kit import DEADLINE_S, Bench, Worker, bench, holder, play, until

from hotswap.config import Timing
from hotswap.core import messages as m
from hotswap.core.types import HeldKind, Source, SourceKind, Suspicion
from hotswap.wire import worker_messages as w

Patch = pytest.MonkeyPatch


# --- registration ------------------------------------------------------------------------------------------------------


def test_a_new_agent_registers_and_beats(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, fault_domain="rack1", timing=Timing(detection_budget_s=0.5)) as it:
            register = await it.register()
            assert register == m.Register(
                node="a#1", fault_domain="rack1", endpoint=it.agent.memory.endpoint, protected=False
            )
            assert await it.hear(m.Heartbeat) == m.Heartbeat(generation=0, protected=False)

    play(scenario())


def test_after_a_restart_of_the_coordinator_it_says_all_that_matters(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            it.drop()
            assert await it.register() == m.Register(
                node="a#1",
                fault_domain="",
                endpoint=it.agent.memory.endpoint,
                generation=1,
                places=("a#1", "b#1"),
                planned=True,
                training=True,
                built=(m.WorkerBuilt(slot=0, generation=1, shape="s"),),
                acked={0: 4},
                protected=True,
                peers={0: ()},
                plans=((1, 4),),
            )
            it.fence(3, plans=((1, 4), (2, 9)))
            worker.park(3)
            await it.hear(m.NodeFenced)
            it.plan(3, 7, Source(kind=SourceKind.LIVE))
            await worker.hear(w.Load)
            it.drop()
            assert (await it.register()).plans == ((1, 4), (3, 7)), "what the last plan has undone needs no mention"

    play(scenario())


@pytest.mark.parametrize("status", [0, -9])
def test_an_end_that_no_coordinator_heard_of_is_told_to_the_next_one(
    tmp_path: Path, monkeypatch: Patch, status: int
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.drop()
            it.spawner.end(worker, status)
            await until(lambda: not it.agent.workers)
            register = await it.register()
            if register.finished == register.lost == ():
                # It had registered before the worker's end; then the end is told as usual.
                await it.hear(m.WorkerFinished if status == 0 else m.WorkerLost)
            else:
                assert (register.finished, register.lost) == (((0,), ()) if status == 0 else ((), (0,)))
            assert it.agent._register().built == ()

    play(scenario())


def test_a_wrong_token_ends_the_agent_as_a_users_mistake(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, token="another token that is long enough") as it:
            with pytest.raises(Exception, match=r"token|handshake"):
                await it.register()
            assert await it.running == 2

    play(scenario())


def test_without_a_coordinator_waiting_workers_are_given_up_after_a_while(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Timing, "coordinator_s", 0.2)

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=Timing(detection_budget_s=0.5)) as it:
            it.listener.close()
            assert await asyncio.wait_for(it.running, 5) == 75

    play(scenario())


def test_training_goes_on_without_a_coordinator(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Timing, "coordinator_s", 1.0)

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=Timing(detection_budget_s=0.5)) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.drop()
            it.listener.close()
            for step in (1, 2, 3):
                it.snapshot(worker, 1, step, it.agent.memory.free(0), 100)
                assert (await worker.hear(w.Acked)).step == step
                await asyncio.sleep(0.4)
            assert not it.running.done()
            # Its peers may train somewhere else by now: nobody comes to a collective any more.
            assert await asyncio.wait_for(it.running, 5) == 75

    play(scenario())


def test_an_error_of_its_own_is_not_taken_for_a_lost_coordinator(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.register()
            it.spawner.gone = True
            it.spawner.break_off()
            assert await asyncio.wait_for(it.running, 5) == 75

    play(scenario())


# --- fence -------------------------------------------------------------------------------------------------------------


def test_the_first_fence_starts_workers_and_is_answered_at_once(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, env={"MASTER_PORT": "4711"}) as it:
            await it.register()
            it.fence(1)
            assert await it.hear(m.NodeFenced) == m.NodeFenced(generation=1, held=(), workers=())
            worker = await it.worker(0)
            fence = await worker.hear(m.Fence)
            assert fence.generation == 1 and fence.places == ("a#1", "b#1")
            env = worker.request.env
            expected = {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "4711",
                "TORCHELASTIC_RUN_ID": "job",
                "HOTSWAP_REHEARSE": "0",
            }
            assert {name: env[name] for name in expected} == expected
            assert it.config.token not in env.values()
            assert worker.request.pgid == os.getpgrp()
            logs = Path(worker.request.stdout_path)
            assert logs == tmp_path / "a" / "gen1" / "slot0.out"
            assert stat.S_IMODE(logs.parent.stat().st_mode) == 0o700

    play(scenario())


def test_a_fence_is_answered_once_every_built_worker_has_parked(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=7)
            it.fence(2)
            assert (await worker.hear(m.Fence)).generation == 2
            worker.park(1, 7)  # late, of the old generation
            await it.silent(m.NodeFenced)
            worker.say(w.Parked(generation=2, step=7, dirty=True, torn=False, groups={}))
            fenced = await it.hear(m.NodeFenced)
            assert [(held.slot, held.step, held.kind) for held in fenced.held] == [(0, 7, HeldKind.OWN)]
            [state] = fenced.workers
            assert (state.step, state.dirty, state.torn) == (7, True, False)
            assert fenced.groups == {0: {}}

    play(scenario())


def test_a_worker_that_is_still_building_is_not_waited_for(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.register()
            it.fence(1)
            worker = await it.worker(0)
            await it.hear(m.NodeFenced)
            it.plan(1, 0, Source(kind=SourceKind.FRESH))
            await worker.hear(w.Load)
            it.fence(2)
            assert (await it.hear(m.NodeFenced)).generation == 2
            assert worker.signals == []

    play(scenario())


def test_a_built_worker_that_was_never_restored_holds_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its model is as its script built it: no state that another slot could go on from."""

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            it.plan(1, 0, Source(kind=SourceKind.FRESH))
            await worker.hear(w.Load)
            worker.say(w.Connected(generation=1))
            await it.hear(m.WorkerConnected)
            it.fence(2)
            await worker.hear(m.Fence)
            worker.park(2)
            fenced = await it.hear(m.NodeFenced)
            assert fenced.workers == () and fenced.held == ()

    play(scenario())


def test_old_and_repeated_fences(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.fence(3)
            await worker.hear(m.Fence)
            worker.park(3)
            await it.hear(m.NodeFenced)
            it.fence(2)
            await it.silent(m.NodeFenced)
            await worker.silent(m.Fence)
            it.fence(3)
            assert (await it.hear(m.NodeFenced)).generation == 3, "told again: the first answer may be lost"
            await worker.silent(m.Fence)

    play(scenario())


def test_a_worker_that_does_not_park_is_killed_and_its_snapshots_stay(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Timing, "park_s", 0.1)

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=5)
            it.fence(2)
            lost = await it.hear(m.WorkerLost)
            assert worker.signals == [signal.SIGKILL]
            assert (lost.slot, lost.status) == (0, -9) and "did not leave the old generation" in lost.detail
            fenced = await it.hear(m.NodeFenced)
            assert [held.step for held in fenced.held] == [5] and fenced.workers == ()
            it.fence(3, lost=(0,))
            assert (await it.worker(1)).slot == 0

    play(scenario())


def test_what_was_undone_while_the_node_was_away_is_dropped_before_it_answers(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            it.snapshot(worker, 1, 5, it.agent.memory.free(0), 100)
            await worker.hear(w.Acked)
            it.fence(2, valid_to=4)
            await worker.hear(m.Fence)
            worker.park(2, 5)
            assert [held.step for held in (await it.hear(m.NodeFenced)).held] == [4]
            it.fence(3, valid_to=-1)
            await worker.hear(m.Fence)
            worker.park(3, 5)
            assert (await it.hear(m.NodeFenced)).held == ()

    play(scenario())


def test_fences_leave_nothing_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    def traces() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            seen: list[tuple[int, int]] = []
            for generation in range(2, 32):
                it.fence(generation)
                await worker.hear(m.Fence)
                worker.park(generation, 0, dirty=True)
                await it.hear(m.NodeFenced)
                it.plan(generation, 0, Source(kind=SourceKind.LIVE))
                await worker.hear(w.Load)
                worker.say(w.Connected(generation=generation))
                worker.say(w.Restored(generation=generation, step=0))
                await it.hear(m.WorkerReady)
                it.tell(m.Go(generation=generation))
                await worker.hear(m.Go)
                seen.append(traces())
            assert max(seen[10:]) <= max(seen[:10]), seen

    play(scenario())


# --- plan, restore, go -------------------------------------------------------------------------------------------------


def test_messages_of_another_generation_have_no_effect(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker(generation=5)
            for generation in (4, 6):
                it.plan(generation, 0, Source(kind=SourceKind.FRESH))
                it.tell(m.Go(generation=generation))
            await worker.silent((w.Load, m.Go))  # type: ignore[arg-type]
            for message in (w.Connected(generation=4), w.Restored(generation=4, step=0)):
                worker.say(message)
            worker.say(w.Trouble(generation=4, detail="old"))
            worker.say(w.Failed(generation=4, detail="old", restore=True))
            await it.silent((m.WorkerConnected, m.WorkerReady, m.WorkerTrouble, m.RestoreFailed))  # type: ignore[arg-type]

    play(scenario())


def test_ready_means_restored_and_replicated(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            it.plan(1, 0, Source(kind=SourceKind.FRESH))
            await worker.hear(w.Load)
            worker.say(w.Reserve(nbytes=64, buffers=2))
            granted = await worker.hear(w.Granted)
            it.snapshot(worker, 1, 0, granted.free, 64)
            worker.say(w.Restored(generation=1, step=0))
            await it.silent(m.WorkerReady)
            it.peer = holder(tmp_path)
            it.peer.fence(1)
            it.agent.memory.endpoints["b#1"] = it.peer.endpoint
            assert (await it.hear(m.WorkerReady)).slot == 0
            assert it.peer.inventory()[0].step == 0

    play(scenario())


async def successor_of_a_lost_worker(it: Bench, directory: Path) -> Worker:
    """A new worker in generation 2, built. What its slot had at step 3 is with the peer alone."""
    it.peer = holder(directory)
    worker = await it.training_worker(step=3)
    it.agent.memory.vault.forget(0, HeldKind.OWN)
    it.spawner.end(worker, -9)
    await it.hear(m.WorkerLost)
    it.fence(2, lost=(0,))
    successor = await it.worker(1)
    await it.hear(m.NodeFenced)
    successor.say(w.Built(shape="s", peers=(), rehearsed=False))
    return successor


def test_a_worker_connects_while_its_state_is_on_its_way(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            successor = await successor_of_a_lost_worker(it, tmp_path)
            may_answer = threading.Event()
            opened = it.peer.vault.open

            def slow_open(*args: Any, **kwargs: Any) -> Any:
                assert may_answer.wait(DEADLINE_S)
                return opened(*args, **kwargs)

            monkeypatch.setattr(it.peer.vault, "open", slow_open)
            it.plan(2, 3, Source(kind=SourceKind.REPLICA, unique_from="b#1", unique_nbytes=100), push=False)
            assert (await successor.hear(w.Connect)).generation == 2
            assert (await successor.hear(w.Granted)).buffers == 2
            successor.say(w.Connected(generation=2))
            await it.hear(m.WorkerConnected)
            await successor.silent(w.Load)
            may_answer.set()
            assert (await successor.hear(w.Load)).resume_step == 3

    play(scenario())


def test_memory_for_snapshots_is_made_beside_everything_else(tmp_path: Path, monkeypatch: Patch) -> None:
    """The kernel fills it with zeros, which takes seconds for a large model: nobody may take this node for silent meanwhile."""

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            vault = it.agent.memory.vault
            may_end, reserve = threading.Event(), vault.reserve

            def slow_reserve(*args: Any) -> Any:
                assert may_end.wait(DEADLINE_S)
                return reserve(*args)

            monkeypatch.setattr(vault, "reserve", slow_reserve)
            worker.say(w.Reserve(nbytes=64, buffers=2))
            await worker.silent(w.Granted)
            await it.hear(m.Heartbeat)
            it.fence(2)
            await worker.hear(m.Fence)
            may_end.set()
            assert (await worker.hear(w.Granted)).buffers == 2

    play(scenario())


def test_a_worker_that_asks_for_more_memory_than_there_is_ends_with_the_reason(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            worker.say(w.Reserve(nbytes=2**60, buffers=2))
            await until(lambda: bool(worker.signals))
            it.spawner.end(worker, -9)
            assert "memory" in (await it.hear(m.WorkerLost)).detail

    play(scenario())


def test_memory_of_a_spare_is_there_before_it_is_needed(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.register()
            it.fence(1, ("b#1",), positions=(0,))
            worker = await it.worker(0)
            worker.say(w.Reserve(nbytes=2**60, buffers=2, ahead=True))
            await worker.silent(w.Granted)
            assert worker.signals == []
            worker.say(w.Reserve(nbytes=64, buffers=2, ahead=True))
            assert (await worker.hear(w.Granted)).buffers == 2
            it.fence(2, ("b#1",), positions=())
            await until(lambda: bool(worker.signals))
            assert it.agent.memory.buffers(0) == []

    play(scenario())


def test_a_lost_slot_is_fetched_from_the_holder(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            successor = await successor_of_a_lost_worker(it, tmp_path)
            source = Source(kind=SourceKind.REPLICA, unique_from="b#1", unique_nbytes=100)
            it.plan(2, 3, source, push=False)
            assert (await successor.hear(w.Granted)).buffers == 2
            load = await successor.hear(w.Load)
            assert (load.resume_step, load.source, load.unique_nbytes) == (3, SourceKind.REPLICA, 100)
            view = it.agent.memory.buffers(0)[load.buffer].view()
            assert bytes(view[:100]) == bytes([4]) * 100
            assert load.free != load.buffer

    play(scenario())


def test_a_source_that_cannot_be_reached_is_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.built_worker()
            it.plan(1, 3, Source(kind=SourceKind.REPLICA, unique_from="c#1", unique_nbytes=100))
            failed = await it.hear(m.RestoreFailed)
            assert failed.slot == 0 and "address of c#1" in failed.detail

    play(scenario())


def test_a_worker_that_cannot_restore_is_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            worker.say(w.Failed(generation=1, detail="checksum", restore=True))
            assert (await it.hear(m.RestoreFailed)).detail == "checksum"

    play(scenario())


def test_progress_is_told_at_once(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=Timing(detection_budget_s=1000)) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.snapshot(worker, 1, 1, it.agent.memory.free(0), 100)
            assert (await it.hear(m.Heartbeat)).acked == {0: 1}
            assert await worker.hear(w.Acked) == w.Acked(generation=1, step=1, free=it.agent.memory.free(0))

    play(scenario())


# --- workers end -------------------------------------------------------------------------------------------------------


def test_last_words_count(tmp_path: Path, monkeypatch: Patch) -> None:
    """A snapshot that was announced just before the death is there; then the death is reported."""

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.snapshot(worker, 1, 1, it.agent.memory.free(0), 100)
            worker.say(w.Failed(generation=0, detail="ValueError: oops"))
            it.spawner.end(worker, 1)
            lost = await it.hear(m.WorkerLost)
            assert lost == m.WorkerLost(slot=0, generation=1, status=1, detail="ValueError: oops")
            assert {held.step for held in it.agent.memory.inventory()} == {0, 1}

    play(scenario())


def test_a_worker_that_finished_is_reported_and_a_fence_starts_it_again(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker()
            it.spawner.end(worker, 0)
            assert await it.hear(m.WorkerFinished) == m.WorkerFinished(slot=0, generation=1)
            it.fence(2)
            assert (await it.worker(1)).slot == 0

    play(scenario())


def test_without_hotswap_in_the_script_what_finished_stays_finished(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.register()
            it.fence(1)
            worker = await it.worker(0)
            it.spawner.end(worker, 0)
            await it.hear(m.WorkerFinished)
            it.fence(2)
            await it.hear(m.NodeFenced)
            assert await it.hear(m.WorkerFinished) == m.WorkerFinished(slot=0, generation=2)
            assert len(it.spawner.workers) == 1

    play(scenario())


def test_a_worker_that_speaks_nonsense_is_ended(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            await asyncio.get_running_loop().sock_sendall(worker.link._sock, b"\xff\xff\xff\xff")
            lost = await it.hear(m.WorkerLost)
            assert worker.signals == [signal.SIGKILL] and "limit" in lost.detail

    play(scenario())


def test_that_the_script_uses_hotswap_is_told_at_once(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=Timing(detection_budget_s=1000)) as it:
            await it.register()
            it.fence(1)
            worker = await it.worker(0)
            worker.say(w.Joined())
            assert (await it.hear(m.Heartbeat)).protected

    play(scenario())


# --- spares ------------------------------------------------------------------------------------------------------------

OTHERS = ("b#1", "c#1")


async def spare(it: Bench, positions: tuple[int, ...]) -> None:
    await it.register()
    it.fence(1, OTHERS, positions=positions)
    await it.hear(m.NodeFenced)


def test_a_spare_builds_for_the_positions_it_is_told_as_far_as_it_may(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, nproc_per_node=2, spare_positions=1) as it:
            await spare(it, ())
            assert it.spawner.workers == []
            it.fence(1, OTHERS, positions=(1, 0))
            workers = [await it.worker(0), await it.worker(1)]
            assert [worker.slot for worker in workers] == [2, 3]
            assert all(worker.request.env["HOTSWAP_REHEARSE"] == "1" for worker in workers)
            await it.hear(m.NodeFenced)
            it.fence(1, OTHERS, positions=(1, 0))
            await it.hear(m.NodeFenced)
            assert len(it.spawner.workers) == 2, "told again"

    play(scenario())


def test_a_hot_spare_is_promoted_with_its_worker(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await spare(it, (1, 0))
            worker = await it.worker(0)
            worker.say(w.Built(shape="s", peers=(), rehearsed=True))
            await it.hear(m.WorkerBuilt)
            it.fence(2, ("b#1", "a#1"), lost=(1,))
            await worker.hear(m.Fence)
            worker.park(2)
            fenced = await it.hear(m.NodeFenced)
            assert fenced.workers == ()
            assert len(it.spawner.workers) == 1 and worker.signals == []

    play(scenario())


def test_a_spare_of_another_place_starts_anew_when_it_is_promoted(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await spare(it, (1, 0))
            idle = await it.worker(0)
            it.fence(2, ("a#1", "c#1"), lost=(0,))
            successor = await it.worker(1)
            await it.hear(m.NodeFenced)
            assert idle.signals == [signal.SIGKILL]
            assert successor.slot == 0 and successor.request.env["HOTSWAP_REHEARSE"] == "0"
            await it.silent(m.WorkerLost)

    play(scenario())


def test_a_spare_whose_workers_keep_dying_stays_without_them(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await spare(it, (0, 1))
            for attempt in range(4):
                worker = await it.worker(attempt)
                it.spawner.end(worker, 1)
                lost = await it.hear(m.WorkerLost)
                assert (lost.slot, lost.status) == (worker.slot, 1), "the coordinator must not count on it"
            await until(lambda: not it.agent.workers)
            assert len(it.spawner.workers) == 4
            it.fence(2, ("a#1", "c#1"), lost=(0,))
            assert (await it.worker(4)).slot == 0, "promoted, it starts them all the same"

    play(scenario())


# --- rendezvous --------------------------------------------------------------------------------------------------------


def test_the_coordinator_is_asked_once_and_neighbours_are_answered_here(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, nproc_per_node=2) as it:
            await it.register()
            it.fence(1)
            both: list[Worker] = [await it.worker(0), await it.worker(1)]
            for worker in both:
                worker.say(m.KvGet(generation=1, key="far"))
            assert await it.hear(m.KvGet) == m.KvGet(generation=1, key="far")
            await it.silent(m.KvGet)
            it.tell(m.KvValue(generation=1, key="far", value=b"there"))
            for worker in both:
                assert (await worker.hear(m.KvValue)).value == b"there"
            both[0].say(m.KvGet(generation=1, key="far"))
            assert (await both[0].hear(m.KvValue)).value == b"there"
            both[0].say(m.KvGet(generation=1, key="near"))
            await it.hear(m.KvGet)
            both[1].say(m.KvSet(generation=1, key="near", value=b"here"))
            assert (await both[0].hear(m.KvValue)).value == b"here"
            assert (await it.hear(m.KvSet)).value == b"here"

    play(scenario())


def test_values_of_an_old_generation_reach_nobody(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker(generation=2)
            worker.say(m.KvGet(generation=1, key="k"))
            await it.silent(m.KvGet)
            worker.say(m.KvGet(generation=2, key="k"))
            await it.hear(m.KvGet)
            it.tell(m.KvValue(generation=1, key="k", value=b"old"))
            await worker.silent(m.KvValue)

    play(scenario())


# --- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 75, 143])
def test_stop_tells_the_workers_and_ends_with_the_jobs_code(tmp_path: Path, monkeypatch: Patch, code: int) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            worker = await it.built_worker()
            it.tell(m.Stop(exit_code=code, reason="over"))
            assert await worker.hear(w.Finish) == w.Finish(exit_code=code, reason="over")
            assert await it.running == code
            assert worker.signals == [signal.SIGTERM]

    play(scenario())


def test_a_spare_does_not_start_workers_again_while_it_leaves(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await spare(it, (0, 1))
            await it.worker(0)
            it.tell(m.Stop(exit_code=0, reason="over"))
            assert await it.running == 0
            assert len(it.spawner.workers) == 1

    play(scenario())


def test_workers_that_do_not_leave_are_killed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("hotswap.node.workers.END_S", 0.1)

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.spawner.obeys_sigterm = False
            worker = await it.built_worker()
            it.tell(m.Stop(exit_code=1, reason="over"))
            assert await it.running == 1
            assert worker.signals == [signal.SIGTERM, signal.SIGKILL]

    play(scenario())


def test_a_worker_that_was_a_spares_meanwhile_gets_memory_again(tmp_path: Path, monkeypatch: Patch) -> None:
    """A spare frees the memory of slots that it no longer has; its workers for the same places still map it."""

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            for generation, places in ((2, ("c#1", "b#1")), (3, ("a#1", "b#1"))):
                it.fence(generation, places, positions=(0,))
                await worker.hear(m.Fence)
                worker.park(generation, step=4)
                await it.hear(m.NodeFenced)
                it.plan(generation, 4, Source(kind=SourceKind.FRESH), push=False)
                if generation == 2:
                    it.tell(m.Go(generation=2))
            granted = await worker.hear(w.Granted)
            assert (await worker.hear(w.Load)).free == granted.free
            it.snapshot(worker, 3, 4, granted.free, 100)
            worker.say(w.Restored(generation=3, step=4))
            await it.hear(m.WorkerReady)

    play(scenario())


# --- comparisons of state ----------------------------------------------------------------------------------------------


def test_a_worker_that_differs_is_ended_and_what_is_suspect_is_told_with_the_fence(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            agreed = w.Compared(generation=1, step=4, verified=4)
            worker.say(w.Comparing(generation=1, step=4, verified=-1))
            worker.say(agreed)
            assert await it.hear(m.StateCompared) == m.StateCompared(slot=0, generation=1, step=4, verified=4)
            worker.say(w.Compared(generation=0, step=3, verified=2, odd=(0,)))
            worker.say(w.Compared(generation=1, step=5, verified=4, odd=(0,), detail="model/weight"))
            told = await it.hear(m.StateCompared)
            assert (told.step, told.verified, told.odd, told.detail) == (5, 4, (0,), "model/weight")
            lost = await it.hear(m.WorkerLost)
            assert lost.detail.startswith("its state differs from that of its peers at step 5: model/weight")
            it.fence(2, lost=(0,))
            assert (await it.hear(m.NodeFenced)).suspicion == Suspicion(verified=4, odd=(0,))
            it.plan(2, 4, Source(kind=SourceKind.OWN))
            await until(lambda: it.agent.memory.suspicion is None)

    play(scenario())


def test_a_node_that_gave_its_place_away_keeps_what_all_agreed_on_until_it_hears_of_another(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            worker.say(w.Comparing(generation=1, step=4, verified=-1))
            worker.say(w.Compared(generation=1, step=4, verified=4))
            await it.hear(m.StateCompared)
            it.fence(2, ("c#1", "b#1"))
            await worker.hear(m.Fence)
            worker.park(2, step=4)
            await it.hear(m.NodeFenced)
            it.plan(2, 4, Source(kind=SourceKind.FRESH), push=False)
            it.tell(m.Go(generation=2))
            it.tell(m.Agreed(generation=1, step=9))
            it.fence(3, ("c#1", "b#1"))
            held = (await it.hear(m.NodeFenced)).held
            assert [(item.slot, item.step) for item in held] == [(0, 4)]
            it.plan(3, 4, Source(kind=SourceKind.FRESH), push=False)
            it.tell(m.Go(generation=3))
            it.tell(m.Agreed(generation=3, step=5))
            await until(lambda: it.agent.memory.inventory() == ())

    play(scenario())


def test_what_is_suspect_is_told_although_a_fence_came_first(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            it.fence(2)
            await worker.hear(m.Fence)
            worker.say(w.Compared(generation=1, step=4, verified=3, odd=(1,)))
            worker.park(2, 4, dirty=True)
            assert (await it.hear(m.NodeFenced)).suspicion == Suspicion(verified=3, odd=(1,))
            it.fence(3, valid_to=2)
            await worker.hear(m.Fence)
            worker.park(3, 4, dirty=True)
            told = await it.hear(m.NodeFenced)
            assert told.suspicion is None, "this node has missed the plan that went back"

    play(scenario())


def test_a_job_of_another_size_begins_with_new_processes_and_an_empty_memory(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            assert (worker.request.env["WORLD_SIZE"], worker.request.env["HOTSWAP_FULL_WORLD_SIZE"]) == ("2", "2")
            it.fence(2, places=("a#1",), size_since=2, lost=(0,))
            answer = await it.hear(m.NodeFenced)
            assert (answer.held, answer.workers) == ((), ())
            assert worker.signals == [signal.SIGKILL]
            successor = await it.worker(1)
            sizes = {key: successor.request.env[key] for key in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "RANK")}
            assert sizes == {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "RANK": "0"}
            assert successor.request.env["HOTSWAP_FULL_WORLD_SIZE"] == "2"
            await it.silent(m.WorkerLost)
            it.drop()
            register = await it.register()
            assert (register.size_since, register.places, register.peers) == (2, ("a#1",), {})

    play(scenario())


def test_a_node_that_has_missed_two_changes_of_size_keeps_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.peer = holder(tmp_path)
            worker = await it.training_worker(step=4)
            it.fence(4, size_since=4, lost=(0, 1))
            assert (await it.hear(m.NodeFenced)).held == ()
            assert worker.signals == [signal.SIGKILL]
            again = await it.worker(1)
            it.fence(5, size_since=4)
            await again.hear(m.Fence)
            assert again.signals == [], "it is of this size already"

    play(scenario())
