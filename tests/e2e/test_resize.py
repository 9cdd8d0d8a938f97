"""No spare, and no node comes: the job goes on with fewer, from storage, and with all again when a node arrives.

Its losses and its final state are bit for bit those of a fresh job of that size that starts from the same durable checkpoint, and
every sample is consumed once, whoever does it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import DDP, FSDP2, MEGATRON, SCRIPTS, Cell, Job, Outcome, Program, assert_clean

from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.records import Record, read_records, resume_points, surviving

pytestmark = pytest.mark.e2e
Start = Callable[[Cell], AbstractContextManager[Job]]
LONG = 50
PACED = str(Path(__file__).parent / "scripts" / "paced.py")
FOUR = Layout(dp=4)
DDP4 = replace(DDP, name="ddp-four-nodes", nodes=4, train=replace(DDP.train, layout=FOUR, steps=LONG))
# 32 columns and heads of other sizes: chunks of uneven length, some of them empty.
FSDP4 = replace(FSDP2, name="fsdp2-four-nodes", nodes=4, width=1, train=replace(FSDP2.train, steps=LONG))
FSDP_TWO = replace(
    FSDP4,
    name="fsdp2-two-nodes",
    nodes=2,
    train=TrainOptions(**{**vars(FSDP4.train), "layout": Layout(dp=2), "steps": 30}),
)
PROGRAMS = [DDP4, FSDP4]


def cell_of(program: Program, durable: Path, *flags: str, pace: str = "0") -> Cell:
    """Durable checkpoints far apart: those that count were asked for."""
    arguments = ("--checkpoint-dir", str(durable), "--checkpoint-interval", "1000", *flags)
    script = (PACED, pace, str(SCRIPTS / program.script))
    return Cell(program=program, spares=0, run_arguments=arguments, script=script, deadline_s=120)


def fresh(program: Program, nodes: int) -> Program:
    """The same training by a job that never had another size."""
    times = program.nodes // nodes
    train = TrainOptions(**{**vars(program.train), "microbatches": program.train.microbatches * times})
    return replace(program, name=f"{program.name}-{nodes}", nodes=nodes, train=train)


def kept(job: Job, durable: Path) -> tuple[int, Path]:
    """The checkpoint that a resized job goes on from, before it is replaced by newer ones."""
    restored = job.wait_for("restored_from_checkpoint")
    step = int(restored["step"])
    copy = durable.with_name(f"{durable.name}-{step}")
    shutil.copytree(durable / f"step-{step:08d}", copy / f"step-{step:08d}")
    return step, copy


@contextmanager
def another_node(job: Job) -> Iterator[None]:
    """It joins the running job, as from another machine."""
    described = job.described()
    [(host, port)] = described["coordinators"]
    command = [
        *(sys.executable, "-m", "hotswap.cli", "run", "--nnodes", f"{job.cell.program.nodes}"),
        *("--nproc-per-node", str(job.cell.program.width), "--node-name", "late", "--rdzv-id", "job"),
        *("--coordinator", f"{host}:{port}", "--token-file", str(described["token_file"])),
        *("--detection-budget-s", "30", "--overhead-limit", "0", "--log-dir", str(job.directory)),
        *job.cell.run_arguments,
        *job.cell.script,
        *job.cell.train.to_arguments(),
        *("--out", str(job.directory)),
    ]
    with (job.directory / "late.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=job.environment())
    try:
        yield
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def losses(records: list[Record], first: int, last: int) -> dict[tuple[int, int], str | None]:
    return {(record.step, record.slot): record.loss for record in records if first <= record.step < last}


def samples_of(records: list[Record]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for record in records:
        found.setdefault(record.step, []).extend(record.sample_ids)
    return {step: sorted(ids) for step, ids in found.items()}


def what_counts(outcome: Outcome, directory: Path) -> list[Record]:
    return surviving(read_records(directory), resume_points(outcome.events))


def assert_every_sample_once(records: list[Record], train: TrainOptions) -> None:
    count = train.batch(train.layout.dp).samples_per_step
    assert samples_of(records) == {step: list(range(step * count, (step + 1) * count)) for step in range(train.steps)}


def continued(start: Start, program: Program, nodes: int, checkpoint: Path) -> tuple[Outcome, list[Record]]:
    """A fresh job of *nodes* nodes from *checkpoint* on."""
    job_cell = cell_of(fresh(program, nodes), checkpoint)
    with start(job_cell) as job:
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == 0, outcome.story
    return outcome, what_counts(outcome, job.directory)


def resized(outcome: Outcome) -> list[tuple[int, int]]:
    return [(event["before"], event["now"]) for event in outcome.named("job_resized")]


@pytest.mark.full_matrix
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_job_goes_on_with_fewer_nodes(program: Program, start: Start, tmp_path: Path) -> None:
    cell = cell_of(program, tmp_path / "durable", "--min-nodes", "2", "--spare-wait-s", "1")
    with start(cell) as job:
        job.wait_for("step_committed", step=10)
        job.kill_node("node1")
        job.wait_for("job_resized")
        step, checkpoint = kept(job, tmp_path / "durable")
        outcome = job.finish()
    assert_clean(outcome)
    assert (outcome.exit_code, resized(outcome)) == (0, [(4, 2)]), outcome.story
    assert outcome.named("committed_steps_lost") == []
    records = what_counts(outcome, job.directory)
    assert_every_sample_once(records, program.train)
    reference, expected = continued(start, program, 2, checkpoint)
    assert losses(records, step, LONG) == losses(expected, step, LONG)
    assert outcome.final == reference.final


@pytest.mark.parametrize(
    "program",
    [*(pytest.param(program, marks=pytest.mark.full_matrix) for program in PROGRAMS), FSDP_TWO],
    ids=lambda program: program.name,
)
def test_it_grows_back_when_a_node_arrives(program: Program, start: Start, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    all_nodes, fewer, steps = program.nodes, program.nodes // 2, program.train.steps
    # Long enough for a node to come, however busy the machine is; with all nodes as fast as it goes.
    cell = cell_of(program, durable, "--min-nodes", f"{fewer}", "--spare-wait-s", "1", pace=f"0.3@{fewer}")
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        job.kill_node("node1")
        job.wait_for("job_resized")
        small, checkpoint = kept(job, durable)
        with another_node(job):
            job.wait_for("job_resized")
            large, larger_checkpoint = kept(job, durable)
            outcome = job.finish()
    assert_clean(outcome)
    assert (outcome.exit_code, resized(outcome)) == (0, [(all_nodes, fewer), (fewer, all_nodes)]), outcome.story
    assert outcome.named("committed_steps_lost") == []
    assert 0 < small < large < steps
    records = what_counts(outcome, job.directory)
    assert_every_sample_once(records, program.train)
    _, expected = continued(start, program, fewer, checkpoint)
    assert losses(records, small, large) == losses(expected, small, large)
    reference, expected = continued(start, program, all_nodes, larger_checkpoint)
    assert losses(records, large, steps) == losses(expected, large, steps)
    assert outcome.final == reference.final


@pytest.mark.full_matrix
def test_what_cannot_be_laid_out_anew_is_refused_at_the_start(start: Start, tmp_path: Path) -> None:
    with start(replace(cell_of(MEGATRON, tmp_path / "durable", "--min-nodes", "1"), script=())) as job:
        outcome = job.finish()
    assert_clean(outcome)
    assert outcome.exit_code == 1
    assert "leave --min-nodes out" in outcome.story


@pytest.mark.full_matrix
def test_too_few_nodes_are_left(start: Start, tmp_path: Path) -> None:
    cell = cell_of(DDP4, tmp_path / "durable", "--min-nodes", "2", "--spare-wait-s", "1", pace="0.1")
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        for node in ("node0", "node1", "node2"):
            job.kill_node(node)
        outcome = job.finish()
    assert_clean(outcome)
    assert (outcome.exit_code, resized(outcome)) == (75, [])


@pytest.mark.full_matrix
def test_the_coordinator_is_lost_while_the_job_is_small(start: Start, tmp_path: Path) -> None:
    cell = cell_of(DDP4, tmp_path / "durable", "--min-nodes", "2", "--spare-wait-s", "1", pace="0.1@2")
    with start(cell) as job:
        job.wait_for("step_committed", step=5)
        job.kill_node("node3")
        job.wait_for("job_resized")
        job.wait_for("recovery_done")
        job.kill_coordinator()
        job.wait_for("coordinator_took_over")
        job.kill_node("node0")
        outcome = job.finish()
    assert_clean(outcome)
    assert (outcome.exit_code, resized(outcome)) == (0, [(4, 2)]), outcome.story
    (promoted,) = outcome.named("spare_promoted")
    assert promoted["node"] == "node2#1"
    assert_every_sample_once(what_counts(outcome, job.directory), DDP4.train)
