from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hotswap.demo import chart
from hotswap.demo.screen import Screen, picture
from hotswap.demo.view import JobView, tell

finite = st.floats(0, 999)

STORY: list[dict[str, Any]] = [
    {"time": 10.0, "event": "coordinator_started", "restarted": False, "pid": 1},
    {"time": 10.1, "event": "node_joined", "generation": 0, "node": "node0#1", "role": ""},
    {"time": 10.1, "event": "job_started", "generation": 1, "nodes": ["node0#1", "node1#1", "node2#1"], "width": 4},
    {
        "time": 10.1,
        "event": "recovery_started",
        "generation": 1,
        "cause": "start",
        "lost": [],
        "places": ["node0#1", "node1#1"],
    },
    {"time": 10.2, "event": "recovery_planned", "generation": 1, "resume_step": 0},
    {"time": 11.0, "event": "training_started", "generation": 1, "step": 0},
    {"time": 11.1, "event": "spare_ready", "generation": 1, "node": "node2#1"},
    {"event": "record", "step": 7, "dp_rank": 0, "loss": (3.5).hex()},
    {"time": 12.0, "event": "step_committed", "generation": 1, "step": 7},
    {"time": 12.5, "event": "death", "kind": "node", "slot": 5, "moment": "backward", "step": 7},
    {
        "time": 12.5,
        "event": "node_lost",
        "generation": 1,
        "node": "node1#1",
        "role": "active",
        "reason": "connection closed",
    },
    {
        "time": 12.5,
        "event": "spare_promoted",
        "generation": 2,
        "node": "node2#1",
        "replaces": "node1#1",
        "position": 1,
        "hot": True,
    },
    {
        "time": 12.5,
        "event": "recovery_started",
        "generation": 2,
        "cause": "node1#1 lost",
        "lost": [4, 5, 6, 7],
        "places": ["node0#1", "node2#1"],
    },
    {"time": 12.6, "event": "recovery_planned", "generation": 2, "resume_step": 7},
    {"time": 12.7, "event": "training_started", "generation": 2, "step": 7},
    {"time": 12.8, "event": "step_committed", "generation": 2, "step": 8},
    {
        "time": 12.8,
        "event": "recovery_done",
        "generation": 2,
        "resume_step": 7,
        "redone_steps": 1,
        "phases_ms": {"total": 300.0},
    },
]


@given(reference=st.lists(finite, max_size=80), run=st.lists(finite, max_size=80), mark=st.none() | st.integers(0, 90))
def test_a_chart_is_always_drawn_within_its_width(reference: list[float], run: list[float], mark: int | None) -> None:
    lines = chart.draw(reference, run, mark=mark, width=40, height=8)
    assert (lines == []) is (not reference and not run)
    assert all(len(line) <= 9 + 40 for line in lines[:9])


def test_equal_curves_coincide_and_others_do_not() -> None:
    same = "".join(chart.draw([3.0, 2.0, 1.0], [3.0, 2.0, 1.0])[:-1])
    assert same.count(chart.BOTH) == 3
    assert chart.RUN not in same
    other = "".join(chart.draw([3.0, 2.0, 1.0], [3.0, 2.0, 2.5])[:-1])
    assert (other.count(chart.BOTH), other.count(chart.REFERENCE), other.count(chart.RUN)) == (2, 1, 1)


def test_a_difference_in_the_last_bit_is_not_drawn_as_the_same() -> None:
    lines = chart.draw([3.0, 0.1 + 0.2], [3.0, 0.3])
    assert "".join(lines[:-1]).count(chart.BOTH) == 1


def test_the_picture_follows_the_story() -> None:
    view = JobView(steps=20)
    for event in STORY:
        view.apply(event)
    assert (view.step, view.loss, view.committed, view.generation) == (7, 3.5, 8, 2)
    roles = {name: (node.role, node.slots, node.state) for name, node in view.nodes.items()}
    assert roles == {
        "node0": ("active", "0-3", "training"),
        "node1": ("lost", "", "lost"),
        "node2": ("active", "4-7", "training"),
    }


def test_while_it_recovers_the_nodes_say_so() -> None:
    view = JobView(steps=20)
    for event in STORY[:13]:
        view.apply(event)
    assert {name: node.state for name, node in view.nodes.items()} == {
        "node0": "recovering",
        "node1": "lost",
        "node2": "recovering",
    }


def test_each_thing_that_happened_is_told_once_in_order() -> None:
    view = JobView(steps=20)
    for event in STORY:
        view.apply(event)
    assert [sentence for _, sentence in view.story] == [
        "3 nodes with 4 workers each: node0, node1, node2",
        "training starts at step 0",
        "node2 is a hot spare now",
        "kill -9: the whole node of slot 5 in backward of step 7",
        "node1 is gone: connection closed",
        "node2 takes the place of node1; its workers are built and rehearsed",
        "generation 2 begins: node1#1 lost",
        "every slot can be restored to step 7",
        "the first new step is committed, 300 ms after the loss was noticed; 1 step redone",
    ]
    assert view.story[0][0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            {"event": "death", "kind": "worker", "slot": 2, "moment": "gather", "step": 4},
            "kill -9: the worker of slot 2 in gather of step 4",
        ),
        (
            {"event": "death", "kind": "spare", "node": "node2", "slot": None, "moment": None, "step": 4},
            "kill -9: the spare node2 with step 4 committed",
        ),
        (
            {"event": "death", "kind": "coordinator", "slot": None, "moment": None, "step": 4},
            "kill -9: the coordinator with step 4 committed",
        ),
        (
            {"event": "worker_lost", "slot": 2, "detail": "killed by SIGKILL"},
            "the worker of slot 2 is gone: killed by SIGKILL",
        ),
        ({"event": "coordinator_started", "restarted": True}, "a new coordinator has started"),
        ({"event": "coordinator_started", "restarted": False}, None),
        ({"event": "coordinator_took_over", "members": 2}, "it has heard 2 nodes and takes over"),
        ({"event": "waiting_for_node", "missing": 1, "wait_s": 60.0}, "no spare left, waiting up to 60 s for a node"),
        (
            {"event": "restored_from_checkpoint", "step": 5},
            "no copy in memory: going back to the durable checkpoint of step 5",
        ),
        ({"event": "restore_failed", "slot": 1, "detail": "checksum"}, "slot 1 could not be restored: checksum"),
        ({"event": "job_stopped", "reason": "every worker finished"}, "the end: every worker finished"),
        ({"event": "phase_started", "phase": "fence"}, None),
        ({"event": "recovery_started", "generation": 1, "cause": "start"}, None),
    ],
)
def test_sentences(event: dict[str, Any], sentence: str | None) -> None:
    assert tell(event) == sentence


def shown(*, terminal: bool) -> str:
    screen = Screen(io.StringIO())
    screen.console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    screen._live = terminal
    with screen.job("a job", JobView(steps=20)) as notice:
        for event in STORY:
            notice(event)
        notice({})
    return str(screen.console.file.getvalue())  # type: ignore[attr-defined]


def test_without_a_terminal_there_are_only_plain_lines() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert text.count("kill -9") == 1
    assert "step 7  loss 3.5000" in text


def test_on_a_terminal_the_story_stays_when_the_picture_goes() -> None:
    assert "300 ms after the loss was noticed" in shown(terminal=True).splitlines()[-1]


def test_the_picture_names_nodes_roles_and_progress() -> None:
    view = JobView(steps=20)
    for event in STORY:
        view.apply(event)
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for piece in ("step 7", "committed 8/20", "loss 3.5000", "node2  active  slots 4-7", "node1  lost"):
        assert piece in text


def test_a_silent_screen_says_nothing() -> None:
    stream = io.StringIO()
    screen = Screen(stream, silent=True)
    screen.say("hello")
    with screen.job("a job", JobView(steps=20)) as notice:
        for event in STORY:
            notice(event)
    assert stream.getvalue() == ""


def test_the_loss_shown_is_that_of_all_data_parallel_ranks() -> None:
    view = JobView(steps=20, ranks=2)
    shown = []
    for step, rank, loss in ((0, 1, 2.0), (1, 1, 5.0), (0, 0, 4.0), (1, 0, 7.0), (1, 0, 7.0)):
        view.apply({"event": "record", "step": step, "dp_rank": rank, "loss": loss.hex()})
        shown.append((view.step, view.loss))
    assert shown == [(0, None), (0, None), (0, 3.0), (1, 6.0), (1, 6.0)]
