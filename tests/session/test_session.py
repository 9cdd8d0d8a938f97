"""The session in a real worker, step by step."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from session_kit import Server, touch, worker

from hotswap.core import messages as m
from hotswap.core.types import SourceKind
from hotswap.session.session import NOTICE_S
from hotswap.session.settings import STACKS_SIGNAL
from hotswap.wire import worker_messages as w

STEPS = 4


def test_a_whole_run_and_the_last_step_is_safe_before_it_ends(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path) as it:
        it.train(range(STEPS), it.start())
        it.silent()
        it.ack(STEPS)
        assert it.status() == 0
        assert [line["step"] for line in it.noted("attempt")] == list(range(STEPS))
        assert [line["generation"] for line in it.noted("attempt")] == [1] * STEPS
        assert it.noted("end")[0]["step"] == STEPS


def test_nothing_is_updated_before_the_gate(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path) as it:
        it.start()
        it.wait_noted("attempt")
        it.silent()
        assert it.noted("updated") == []
        it.ack(0)
        it.snapshot(1)
        assert [line["step"] for line in it.noted("updated")] == [0]


def test_a_skipped_update_passes_the_gate_as_well(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "skips update") as it:
        it.start()
        it.train(range(1))
        it.wait_noted("attempt", 2)
        it.silent()
        it.ack(1)
        it.snapshot(2)
        it.wait_noted("attempt", 3)
        before, after = (line["digests"]["model"] for line in it.noted("attempt")[1:3])
        assert before == after


def test_how_far_it_is_is_said_again_and_again(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, heartbeat_s=0.02) as it:
        it.start()
        progress = it.hear(w.Progressed).progress
        while progress.phase != "gate" or not progress.at:
            progress = it.hear(w.Progressed).progress
        assert (progress.step, progress.issued, progress.groups) == (0, 0, {}), "it is the only slot"
        assert progress.at.endswith(" wait"), progress.at
        it.ack(0)
        it.snapshot(1)
        while it.hear(w.Progressed).progress.step == 0:
            pass


def test_a_process_says_where_its_threads_are_when_it_is_asked(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "before update") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        it.wait_noted("spinning")
        it.signal(STACKS_SIGNAL)
        while "in spin" not in it.stacks:
            time.sleep(0.005)
        it.fence(2)
        assert it.hear(w.Parked).generation == 2, "it goes on"


def test_misuse_is_refused_with_a_reason(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "misuse") as it:
        it.start()
        it.wait_noted("going on")
        reasons = {line["action"]: line["why"] for line in it.noted("refused")}
        assert "session.protect" in reasons["attempt"]
        assert "twice" in reasons["protect"]
        assert "outside of session.attempt" in reasons["step"]
        assert "already initialised" in reasons["init"]
        assert "nest" in reasons["nested"]


def test_what_the_script_starts_is_not_the_worker(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "child") as it:
        assert it.status() == 0
        assert it.noted("child")[0]["said"] == "[]"


# --- fences ------------------------------------------------------------------------------------------------------------


def test_a_fence_before_the_update_leaves_a_dirty_state_and_the_step_is_redone_exactly(
    server: Server, tmp_path: Path
) -> None:
    with worker(server, tmp_path, "before update") as it:
        it.start()
        [done] = it.train(range(1))
        it.ack(1)
        it.wait_noted("spinning")
        it.fence(2)
        parked = it.hear(w.Parked)
        assert (parked.generation, parked.step, parked.dirty, parked.torn) == (2, 1, True, False)
        it.load(SourceKind.LIVE, 1, done.buffer, done)
        it.hear(w.Connected)
        assert it.hear(w.Restored).step == 1
        assert it.passed_over == []
        it.ack(1)
        it.go()
        it.snapshot(2)
        first, second = (line for line in it.noted("attempt") if line["step"] == 1)
        assert (first["generation"], second["generation"]) == (1, 2)
        assert first["drawn"] == second["drawn"]
        assert first["digests"] == second["digests"]


def test_a_fence_after_the_update_leaves_a_torn_state_and_the_snapshot_undoes_it(
    server: Server, tmp_path: Path
) -> None:
    with worker(server, tmp_path, "after update") as it:
        it.start()
        [done] = it.train(range(1))
        it.ack(1)
        it.wait_noted("spinning")
        it.fence(2)
        parked = it.hear(w.Parked)
        assert (parked.step, parked.dirty, parked.torn) == (1, True, True)
        it.load(SourceKind.OWN, 1, done.buffer, done)
        assert it.hear(w.Restored).step == 1
        it.ack(1)
        it.go()
        it.snapshot(2)
        first, second = (line for line in it.noted("attempt") if line["step"] == 1)
        assert first["digests"] == second["digests"] and first["drawn"] == second["drawn"]


def test_a_snapshot_is_never_announced_after_a_fence(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "slow snapshot") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        it.wait_noted("waiting")  # in the middle of writing the snapshot of step 2
        it.fence(2)
        time.sleep(0.2)
        touch(tmp_path / "go")
        parked = it.hear(w.Parked)
        assert not any(isinstance(message, w.SnapshotDone) for message in it.passed_over)
        assert (parked.step, parked.torn) == (1, True)


def test_a_fence_on_the_way_into_a_generation(server: Server, tmp_path: Path) -> None:
    """Before the load, between load and go: the worker parks again and goes where the newest generation goes."""
    with worker(server, tmp_path) as it:
        it.hear(w.Joined)
        it.fence(1)
        it.hear(w.Built)
        it.hear(w.Parked)
        it.fence(2)
        assert it.hear(w.Parked).generation == 2
        it.load(SourceKind.FRESH, 0)
        it.hear(w.Connected)
        it.grant()
        done = it.snapshot(0)
        it.hear(w.Restored)
        it.fence(3)
        parked = it.hear(w.Parked)
        assert (parked.generation, parked.step, parked.dirty, parked.torn) == (3, 0, False, False)
        it.load(SourceKind.LIVE, 0, done.buffer, done)
        assert it.hear(w.Restored).generation == 3
        it.go()
        it.train(range(1))
        assert it.noted("attempt")[0]["generation"] == 3


def test_many_fences_leave_no_thread_and_no_descriptor(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path) as it:
        done = it.start()
        for generation in range(2, 22):
            it.wait_noted("attempt", generation - 1)
            it.fence(generation)
            it.hear(w.Parked)
            it.load(SourceKind.LIVE, 0, done.buffer, done)
            it.hear(w.Restored)
            it.go()
        it.train(range(1))
        traces = [(line["threads"], line["fds"]) for line in it.noted("attempt")]
        assert len(traces) >= 21
        assert max(traces[10:]) <= max(traces[2:10]), traces


# --- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_of_the_script_is_its_own(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "script error") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        it.wait_noted("attempt", 2)
        began = time.monotonic()
        assert it.hear(w.Failed).detail == "Failure: on purpose"
        assert it.status() == 1
        assert time.monotonic() - began < NOTICE_S + 5
        assert "Failure: on purpose" in it.errors and it.noted("caught")


def test_an_error_that_a_fence_explains_is_a_redo(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "script error") as it:
        it.start()
        [done] = it.train(range(1))
        it.ack(1)
        it.wait_noted("attempt", 2)
        it.fence(2)
        assert it.hear(w.Parked).step == 1
        assert not any(isinstance(message, w.Failed) for message in it.passed_over)
        it.load(SourceKind.LIVE, 1, done.buffer, done)
        it.hear(w.Restored)


def test_a_communication_error_is_reported_and_waits_for_a_fence(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "communication error") as it:
        it.start()
        [done] = it.train(range(1))
        it.ack(1)
        trouble = it.hear(w.Trouble)
        assert trouble.generation == 1 and "Connection closed by peer" in trouble.detail
        it.silent(2 * NOTICE_S)
        it.fence(2)
        it.hear(w.Parked)
        it.load(SourceKind.LIVE, 1, done.buffer, done)
        it.hear(w.Restored)
        it.ack(1)
        it.go()
        it.snapshot(2)


def test_a_communication_error_that_nobody_explains_is_the_scripts(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "communication error", trouble_s=0.3) as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        it.hear(w.Trouble)
        assert "Connection closed by peer" in it.hear(w.Failed).detail
        assert it.status() == 1


def test_an_error_after_the_update_ends_the_script(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "error after update") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        assert "after the update" in it.hear(w.Failed).detail
        assert it.status() == 1


def test_a_step_whose_update_was_done_cannot_be_tried_again_by_the_script(server: Server, tmp_path: Path) -> None:
    """The state is that of the next step already: a second update would be one too many."""
    with worker(server, tmp_path, "tries again") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        assert "after its update had begun" in it.hear(w.Failed).detail
        assert it.status() == 1
        assert len(it.noted("updated")) == 2


def test_bytes_that_are_no_snapshot_are_reported_and_another_source_is_waited_for(
    server: Server, tmp_path: Path
) -> None:
    with worker(server, tmp_path, "before update") as it:
        it.start()
        [done] = it.train(range(1))
        it.ack(1)
        it.wait_noted("spinning")
        spoilt = 1 - done.buffer
        it.memory[spoilt].view()[:] = bytes(it.memory[spoilt].nbytes)
        it.fence(2)
        it.hear(w.Parked)
        it.load(SourceKind.OWN, 1, spoilt, done)
        failed = it.hear(w.Failed)
        assert failed.restore and failed.generation == 2
        it.fence(3)
        parked = it.hear(w.Parked)
        assert parked.torn, "half loaded: only a snapshot makes it whole again"
        it.load(SourceKind.OWN, 1, done.buffer, done)
        assert it.hear(w.Restored).step == 1


# --- rehearsal ---------------------------------------------------------------------------------------------------------


def test_a_rehearsal_is_undone_to_the_last_bit(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, rehearse=True) as it:
        it.hear(w.Joined)
        it.fence(1)
        assert it.hear(w.Built).rehearsed
        it.load(SourceKind.FRESH, 0)
        it.hear(w.Connected)
        it.grant()
        it.snapshot(0)
        it.go()
        it.train(range(1))
        rehearsed, real = it.noted("attempt")[:2]
        assert rehearsed["rehearsing"] and not real["rehearsing"]
        assert it.noted("updated")[0]["step"] == 0
        assert rehearsed["digests"] == real["digests"] == it.noted("protected")[0]["digests"]
        assert rehearsed["drawn"] == real["drawn"]


def test_a_rehearsal_that_fails_does_no_harm(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "fails in rehearsal", rehearse=True) as it:
        it.hear(w.Joined)
        it.fence(1)
        assert not it.hear(w.Built).rehearsed
        assert "in the rehearsal" in it.errors
        it.load(SourceKind.FRESH, 0)
        it.hear(w.Connected)
        it.grant()
        it.snapshot(0)
        it.go()
        it.train(range(1))


# --- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 75])
def test_finish_ends_a_worker_that_waits(server: Server, tmp_path: Path, code: int) -> None:
    with worker(server, tmp_path) as it:
        it.hear(w.Built)
        it.say(w.Finish(exit_code=code, reason="over"))
        assert it.status() == code


@pytest.mark.parametrize("when", ["waiting for a plan", "at the gate", "fenced"])
def test_without_its_agent_a_worker_ends_soon(server: Server, tmp_path: Path, when: str) -> None:
    with worker(server, tmp_path) as it:
        if when == "waiting for a plan":
            it.hear(w.Built)
        else:
            it.start()
            it.wait_noted("attempt")
            if when == "fenced":
                it.say(m.Fence(generation=2, places=("a#1",), endpoints={}))
        it.leave()
        assert it.status(10) == 1
        assert "agent is gone" in it.errors


def test_a_worker_can_be_asked_to_leave_at_any_time(server: Server, tmp_path: Path) -> None:
    with worker(server, tmp_path, "before update") as it:
        it.start()
        it.train(range(1))
        it.ack(1)
        it.wait_noted("spinning")
        it.signal(signal.SIGTERM)
        assert it.status() == -signal.SIGTERM
