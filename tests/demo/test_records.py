from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hotswap.demo.records import Record, Recorder, merge, read_final, read_records, resume_points, surviving
from hotswap.demo.samples import BatchShape, planned_ids

SHAPE = BatchShape(dp_size=2, microbatches=1, rows=2, tokens=8)
SLOTS = 4


@dataclass
class FakeSession:
    slot: int = 0
    step: int = 0
    generation: int = 1
    rehearsing: bool = False
    parts: dict[str, str] = field(default_factory=lambda: {"model": "aa"})

    def digests(self) -> dict[str, str]:
        return self.parts

    def snapshot_nbytes(self) -> int:
        return 100


def planned(steps: int) -> dict[int, dict[int, tuple[int, ...]]]:
    return {step: {rank: tuple(planned_ids(SHAPE, step, rank)) for rank in range(2)} for step in range(steps)}


def record(generation: int, step: int, slot: int) -> Record:
    """Slots 0 and 1 are data-parallel rank 0; only odd slots see a loss, which names its generation so that mix-ups show."""
    rank = slot // 2
    loss = float(1000 * generation + 10 * step + rank).hex() if slot % 2 else None
    ids = tuple(planned_ids(SHAPE, step, rank))
    return Record(generation=generation, step=step, slot=slot, dp_rank=rank, loss=loss, sample_ids=ids)


@dataclass
class Job:
    steps: int
    records: list[Record]
    resumed: dict[int, int]
    last_generation_of: dict[int, int]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job in which each generation but the last dies somewhere, with slots at most one step apart, as the commit gate allows."""
    steps = draw(st.integers(1, 6))
    at, records, resumed, last = 0, [], {1: 0}, {}
    for generation in range(1, draw(st.integers(1, 4))):
        death = draw(st.integers(at, steps - 1))
        for step in range(at, death):
            records += [record(generation, step, slot) for slot in range(SLOTS)]
            last[step] = generation
        noted = draw(st.sets(st.integers(0, SLOTS - 1)))
        records += [record(generation, death, slot) for slot in noted]
        everybody = len(noted) == SLOTS
        last[death] = generation
        at = draw(st.sampled_from([death, death + 1] if everybody and death + 1 < steps else [death]))
        resumed[generation + 1] = at
    final = max(resumed)
    for step in range(at, steps):
        records += [record(final, step, slot) for slot in range(SLOTS)]
        last[step] = final
    return Job(steps=steps, records=draw(st.permutations(records)), resumed=resumed, last_generation_of=last)


@given(job=jobs())
def test_what_survives_is_one_run_without_gaps(job: Job) -> None:
    history = merge(job.records, job.resumed, planned(job.steps), slots=SLOTS)
    assert history.faults == ()
    assert sorted(history.losses) == list(range(job.steps))
    for step, by_rank in history.losses.items():
        generation = job.last_generation_of[step]
        assert {rank: float.fromhex(loss) for rank, loss in by_rank.items()} == {
            rank: 1000 * generation + 10 * step + rank for rank in range(2)
        }


@given(job=jobs(), data=st.data())
def test_a_missing_line_shows(job: Job, data: st.DataObject) -> None:
    kept = surviving(job.records, job.resumed)
    lost = data.draw(st.sampled_from(kept))
    history = merge([r for r in job.records if r is not lost], job.resumed, planned(job.steps), slots=SLOTS)
    assert f"slot {lost.slot} consumed the samples of step {lost.step} 0 times" in history.faults


@given(job=jobs(), data=st.data())
def test_a_double_line_shows(job: Job, data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(surviving(job.records, job.resumed)))
    history = merge([*job.records, twice], job.resumed, planned(job.steps), slots=SLOTS)
    assert f"slot {twice.slot} consumed the samples of step {twice.step} 2 times" in history.faults


@given(job=jobs(), data=st.data())
def test_a_foreign_sample_shows(job: Job, data: st.DataObject) -> None:
    kept = surviving(job.records, job.resumed)
    wrong = data.draw(st.sampled_from(kept))
    changed = [replace(r, sample_ids=(0, 1, 2)) if r is wrong else r for r in job.records]
    history = merge(changed, job.resumed, planned(job.steps), slots=SLOTS)
    assert any(f"slot {wrong.slot} consumed samples in step {wrong.step}" in fault for fault in history.faults)


def test_a_step_redone_without_being_taken_back_shows() -> None:
    records = [record(1, 0, slot) for slot in range(SLOTS)] + [record(2, 0, slot) for slot in range(SLOTS)]
    history = merge(records, {1: 0, 2: 1}, planned(1), slots=SLOTS)
    assert "slot 0 consumed the samples of step 0 2 times" in history.faults


def test_a_rank_without_any_line_shows() -> None:
    history = merge([record(1, 0, 0), record(1, 0, 1)], {1: 0}, planned(1), slots=SLOTS)
    assert history.faults[0] == "data-parallel rank 1 consumed nothing"


def test_slots_that_disagree_about_a_loss_show() -> None:
    records = [record(1, 0, slot) for slot in range(SLOTS)]
    records[0] = replace(records[0], loss=float(7).hex())
    history = merge(records, {1: 0}, planned(1), slots=SLOTS)
    assert history.faults == ("the slots of data-parallel rank 0 disagree about the loss of step 0",)


def test_means_are_over_ranks_in_the_order_of_steps() -> None:
    records = [record(1, step, slot) for step in range(2) for slot in range(SLOTS)]
    records = [replace(r, held_out_loss=float(4).hex()) if r.slot == 1 and r.step == 0 else r for r in records]
    history = merge(records, {1: 0}, planned(2), slots=SLOTS)
    assert history.mean_losses() == [1000.5, 1010.5]
    assert history.mean_held_out() == {0: 4.0}


def test_resume_points_come_from_the_plans() -> None:
    events: list[dict[str, Any]] = [
        {"event": "recovery_planned", "generation": 1, "resume_step": 0},
        {"event": "recovery_started", "generation": 2},
        {"event": "recovery_planned", "generation": 3, "resume_step": 5},
        {"event": "recovery_done", "generation": 3, "resume_step": 5},
    ]
    assert resume_points(events) == {1: 0, 3: 5}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    session = FakeSession(slot=2, step=3, generation=2)
    recorder = Recorder(tmp_path, session, dp_rank=1)
    recorder.attempt([4, 5], loss=0.1 + 0.2, held_out_loss=3.5)
    session.step = 4
    recorder.attempt([6, 7], loss=None)
    recorder.final()
    first, second = read_records(tmp_path)
    assert first == Record(
        generation=2,
        step=3,
        slot=2,
        dp_rank=1,
        loss=(0.1 + 0.2).hex(),
        sample_ids=(4, 5),
        held_out_loss=(3.5).hex(),
    )
    assert second.loss is None
    assert read_final(tmp_path) == {2: {"model": "aa"}}


def test_a_rehearsal_leaves_no_line(tmp_path: Path) -> None:
    session = FakeSession(rehearsing=True)
    Recorder(tmp_path, session, dp_rank=0).attempt([1], loss=1.0)
    assert read_records(tmp_path) == []


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder("", FakeSession(), dp_rank=0)
    recorder.attempt([1], loss=1.0)
    recorder.final()
    assert list(tmp_path.iterdir()) == []


def test_a_successor_appends_to_its_slots_file(tmp_path: Path) -> None:
    for generation in (1, 2):
        Recorder(tmp_path, FakeSession(generation=generation), dp_rank=0).attempt([generation], loss=None)
    lines = (tmp_path / "records" / "slot0.jsonl").read_text().splitlines()
    assert [json.loads(line)["generation"] for line in lines] == [1, 2]
