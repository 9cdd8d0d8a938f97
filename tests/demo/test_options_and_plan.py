from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.demo.options import Layout, TrainOptions, parse_train_options
from hotswap.demo.plan import FRAMEWORKS, Plan, parser, plan_of
from hotswap.errors import UsageError
from hotswap.session.faults import MOMENTS, Fault, parse

sizes = st.integers(1, 16)
layouts = st.builds(Layout, tp=sizes, pp=sizes, dp=sizes)


def plan(*argv: str) -> Plan:
    return plan_of(parser().parse_args(argv))


@given(layout=layouts)
def test_a_layout_parses_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert layout.slots == layout.tp * layout.pp * layout.dp


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp2,tp4", "2", "tp2;dp2", "xp2", "tp-1"])
def test_other_layouts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it like tp2,pp2,dp2"):
        Layout.parse(text)


options = st.builds(
    TrainOptions,
    layout=layouts,
    steps=st.integers(1, 1000),
    lr=st.floats(1e-6, 1.0),
    bf16=st.booleans(),
    overlap=st.booleans(),
    dropout=st.floats(0, 0.9),
    out=st.sampled_from(["", "/tmp/a b"]),
)


@given(chosen=options)
def test_training_options_survive_the_command_line(chosen: TrainOptions) -> None:
    assert parse_train_options(chosen.to_arguments()) == chosen


@given(steps=st.integers(1, 200), warmup=st.integers(0, 50))
def test_the_learning_rate_warms_up_and_falls_to_a_tenth(steps: int, warmup: int) -> None:
    chosen = TrainOptions(steps=steps, warmup=warmup)
    scales = [chosen.lr_scale(step) for step in range(max(steps, warmup) + 2)]
    assert all(0 < scale <= 1 for scale in scales)
    assert scales[:warmup] == sorted(scales[:warmup])
    assert scales[warmup] == 1.0
    assert scales[warmup:] == sorted(scales[warmup:], reverse=True)
    assert scales[-1] == pytest.approx(0.1)


def test_evaluations_come_every_few_steps_or_never() -> None:
    assert [step for step in range(12) if TrainOptions(eval_every=5).evaluates(step)] == [0, 5, 10]
    assert not any(TrainOptions(eval_every=0).evaluates(step) for step in range(12))


def test_the_defaults_are_the_promised_demonstration() -> None:
    made = plan()
    assert (made.framework, str(made.train.layout), made.nodes, made.spares) == ("megatron", "tp2,pp2,dp2", 2, 1)
    assert made.kill == "node"
    assert 0 < made.step < made.train.steps
    assert not made.train.evaluates(made.step)


@given(seed=st.integers(0, 10_000), framework=st.sampled_from(sorted(FRAMEWORKS)))
def test_what_is_drawn_depends_on_the_seed_alone_and_can_happen(seed: int, framework: str) -> None:
    first, again = (plan("--seed", str(seed), "--framework", framework) for _ in range(2))
    assert first == again
    assert first.moment in FRAMEWORKS[framework].moments
    assert 0 <= first.slot < first.train.layout.slots


def test_seeds_reach_every_moment_and_every_slot() -> None:
    drawn = [plan("--seed", str(seed)) for seed in range(200)]
    assert {made.moment for made in drawn} == set(MOMENTS)
    assert {made.slot for made in drawn} == set(range(8))


@pytest.mark.parametrize("kill", ["worker", "node"])
def test_deaths_from_inside_are_faults_of_the_victim(kill: str) -> None:
    made = plan("--kill", kill, "--at", "forward", "--step", "3")
    expected = Fault(step=3, moment="forward", slot=made.slot, scope=kill, occurrence=2)
    assert (made.faults, made.outside) == ((expected,), ())
    assert parse(json.dumps([vars(fault) for fault in made.faults])) == made.faults


def test_deaths_from_outside_come_after_a_committed_step() -> None:
    spare, coordinator = plan("--kill", "spare", "--step", "3"), plan("--kill", "coordinator", "--step", "4")
    assert [(kill.kind, kill.node, kill.step) for kill in (*spare.outside, *coordinator.outside)] == [
        ("spare", "node2", 3),
        ("coordinator", "", 4),
    ]
    assert spare.faults == coordinator.faults == ()
    assert plan("--kill", "none").faults == plan("--kill", "none").outside == ()


@pytest.mark.parametrize(
    ("kill", "victim", "slots"),
    [
        ("worker", "5", {5}),
        ("worker", "node1", {4, 5, 6, 7}),
        ("node", "node1", {4, 5, 6, 7}),
        ("node", "0", {0, 1, 2, 3}),
    ],
)
def test_a_victim_can_be_named(kill: str, victim: str, slots: set[int]) -> None:
    found = {plan("--kill", kill, "--victim", victim, "--seed", str(seed)).slot for seed in range(60)}
    assert found == slots


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kill", "worker", "--victim", "8"], "the slots are 0 to 7"),
        (["--kill", "node", "--victim", "node2"], "the active nodes are node0 to node1"),
        (["--victim", "rack3"], "give a slot"),
        (["--kill", "coordinator", "--victim", "1"], "give a slot"),
        (["--nodes", "3"], "cannot share equally"),
        (["--framework", "fsdp2", "--layout", "tp2,dp2"], "only the axis dp"),
        (["--framework", "ddp", "--bf16"], "for --framework megatron"),
        (["--framework", "ddp", "--at", "gather"], "no such moment"),
        (["--step", "40"], "steps of this run are 0 to 39"),
        (["--steps", "1"], "steps of this run"),
        (["--spares", "0"], "needs a spare"),
        (["--nodes", "1"], "nobody who holds a replica"),
        (["--layout", "tp3"], "cannot share equally"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*argv)


def test_the_description_is_plain_json() -> None:
    described: dict[str, Any] = json.loads(json.dumps(plan("--kill", "node", "--at", "reduce").describe()))
    assert described["at"] == "reduce"
    assert described["train"]["layout"] == "tp2,pp2,dp2"
    assert described["node"] == f"node{described['slot'] // 4}"
