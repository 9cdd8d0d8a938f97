"""The network between real nodes is cut: whoever can still go on together does, and only they."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e_harness import DDP, POLL_S, SCRIPTS, Cell, Event, Outcome, Program, planned, read_lines
from network import Network, can_be_made, network

from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.records import merge, read_final, read_records, resume_points

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not can_be_made(), reason="network namespaces need root"),
    pytest.mark.timeout(180),
]
Reference = Callable[[Cell], Outcome]
HEAD, SPARE = "z", "c"
"""The coordinator's host, itself a spare, and the other spare; ``a`` and ``b`` train."""
HOSTS = (HEAD, "a", "b", SPARE)
TWO = Program(
    name="ddp-two",
    script=DDP.script,
    train=TrainOptions(layout=Layout(dp=2), steps=500, eval_every=50, tokens=64, width=64, layers=2, rows=4, warmup=2),
    nodes=2,
    width=1,
)
DEADLINE_S = 120.0


class Nodes:
    """A launcher on each host."""

    def __init__(self, net: Network, directory: Path) -> None:
        self.net = net
        self.directory = directory
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._seen = 0
        token = directory / "token"
        token.write_text("0123456789abcdef0123456789abcdef")
        token.chmod(0o600)
        for rank, host in enumerate(HOSTS):
            self._start(host, rank, token)

    def _start(self, host: str, rank: int, token: Path) -> None:
        command = [
            *(sys.executable, "-m", "hotswap.cli", "run", "--nnodes", "2:4", "--nproc-per-node", "1"),
            *("--rdzv-endpoint", f"{self.net.addresses[HEAD]}:29400", "--rdzv-id", "job", "--node-rank", str(rank)),
            *("--node-name", host, "--log-dir", str(self.directory / host), "--token-file", str(token)),
            *("--redirects", "3", "--overhead-limit", "0", "--spare-positions", "2"),
            *(str(SCRIPTS / TWO.script), *TWO.train.to_arguments(), "--out", str(self.directory)),
        ]
        with (self.directory / f"{host}.log").open("wb") as log:
            self.launchers[host] = subprocess.Popen(
                self.net.command(host, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def events(self) -> list[Event]:
        path = self.directory / HEAD / "job" / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, name: str, **fields: object) -> Event:
        """The next event of this kind after those waited for."""
        end = time.monotonic() + DEADLINE_S
        while True:
            events = self.events
            for index in range(self._seen, len(events)):
                if events[index]["event"] == name and fields.items() <= events[index].items():
                    self._seen = index + 1
                    return events[index]
            if time.monotonic() > end or self.launchers[HEAD].poll() is not None:
                raise AssertionError(f"no {name} {fields}\n{self.story()}")
            time.sleep(POLL_S)

    def finish(self) -> Outcome:
        """The job ends on its own; what it has left is what counts."""
        code = self.launchers[HEAD].wait(DEADLINE_S)
        events = self.events
        return Outcome(
            exit_code=code,
            events=events,
            deaths=read_lines(self.directory / "faults.jsonl"),
            history=merge(read_records(self.directory), resume_points(events), planned(TWO.train)),
            final=read_final(self.directory),
            console="",
            leftovers=(),
            story=self.story(),
        )

    def story(self) -> str:
        lines = [json.dumps(event)[:300] for event in self.events if event["event"] != "step_committed"]
        for path in [*self.directory.glob("*.log"), *self.directory.glob("*/job/*/agent.log")]:
            lines += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def close(self) -> None:
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(stack.enter_context(network(HOSTS)), tmp_path)
        stack.callback(made.close)
        made.wait_for("spare_ready")
        made.wait_for("step_committed")
        yield made


def assert_same(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.story
    assert outcome.history.faults == (), outcome.history.faults
    assert outcome.history.losses == reference.history.losses
    assert outcome.history.sample_ids == reference.history.sample_ids
    assert outcome.final == reference.final


def assert_replaced(nodes: Nodes, began: float, within_s: float) -> Event:
    """Another node trains in the place of b, that soon."""
    lost = nodes.wait_for("node_lost")
    assert lost["node"].startswith("b#"), nodes.story()
    done = nodes.wait_for("recovery_done")
    print(f"resumed {done['time'] - began:.2f} s after the cut: {lost['reason']}")
    assert done["time"] - began < within_s, nodes.story()
    return lost


def test_a_node_that_nobody_reaches_is_replaced_and_its_return_changes_nothing(
    nodes: Nodes, reference_of: Reference
) -> None:
    began = time.time()
    nodes.net.cut_both("b", ["a", SPARE, HEAD])
    lost = assert_replaced(nodes, began, 10.0)
    assert lost["reason"] == "silent for 2 s"
    nodes.net.heal()
    assert nodes.wait_for("node_joined")["role"] == "spare"
    assert_same(nodes.finish(), reference_of(Cell(program=TWO)))
    assert nodes.launchers["b"].wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    "direction", ["to the coordinator", pytest.param("from the coordinator", marks=pytest.mark.full_matrix)]
)
def test_a_node_that_is_cut_off_from_the_coordinator_in_one_direction_is_replaced(
    direction: str, nodes: Nodes, reference_of: Reference
) -> None:
    began = time.time()
    nodes.net.cut(*(("b", HEAD) if direction == "to the coordinator" else (HEAD, "b")))
    assert_replaced(nodes, began, 15.0)
    assert_same(nodes.finish(), reference_of(Cell(program=TWO)))


@pytest.mark.parametrize("ways", [pytest.param("both", marks=pytest.mark.full_matrix), "one"])
def test_a_node_that_its_peers_do_not_reach_is_replaced_although_the_coordinator_does(
    ways: str, nodes: Nodes, reference_of: Reference
) -> None:
    began = time.time()
    for peer in ("a", SPARE):
        nodes.net.cut("b", peer)
        if ways == "both":
            nodes.net.cut(peer, "b")
    lost = assert_replaced(nodes, began, 30.0)
    assert lost["reason"].startswith("cut off from a#")
    assert_same(nodes.finish(), reference_of(Cell(program=TWO)))
    assert nodes.launchers["b"].wait(DEADLINE_S) == 75


@pytest.mark.full_matrix
def test_a_coordinator_that_is_cut_off_from_all_takes_back_who_has_trained_on(
    nodes: Nodes, reference_of: Reference
) -> None:
    nodes.net.cut_both(HEAD, ["a", "b", SPARE])
    for _ in range(3):
        nodes.wait_for("node_lost")
    nodes.wait_for("waiting_for_node")
    nodes.net.heal()
    nodes.wait_for("recovery_done")
    assert_same(nodes.finish(), reference_of(Cell(program=TWO)))
