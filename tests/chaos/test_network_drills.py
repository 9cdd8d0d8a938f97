"""Faults of the network between hosts: what is cut, what is skipped where there can be none, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotswap.chaos import cli, matrix, network, suite
from hotswap.chaos.cuts import Cut
from hotswap.chaos.matrix import Matrix
from hotswap.demo.runner import JobSpec
from hotswap.errors import UsageError

OBSTACLE = network.obstacle(False)
needs_hosts = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
DRILLS = [name for name, drill in suite.DRILLS.items() if drill.needs]


def cut_of(drill: str, layout: str = "ddp-dp3") -> Cut:
    made = suite.DRILLS[drill].make(suite.LAYOUTS[layout])
    assert made is not None
    (cut,) = made.cuts
    return cut


# --- what is cut ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drill", "unheard"),
    [
        ("cut-node", "node2-node0 node0-node2 node2-node1 node1-node2 node2-node3 node3-node2"),
        ("short-cut", "node2-node0 node0-node2 node2-node1 node1-node2 node2-node3 node3-node2"),
        ("cut-to-coordinator", "node2-node3"),
        ("cut-from-coordinator", "node3-node2"),
        ("cut-from-peers", "node2-node0 node0-node2 node2-node1 node1-node2"),
        ("slow-link", ""),
    ],
)
def test_who_no_longer_hears_whom(drill: str, unheard: str) -> None:
    """Of three nodes that train the last one; node3 is the spare, and has the coordinator."""
    cut = cut_of(drill)
    assert (cut.node, sorted("-".join(pair) for pair in cut.lost)) == ("node2", sorted(unheard.split()))
    assert cut.heals == (drill in ("short-cut", "slow-link"))
    assert bool(cut.kbit_per_s) == (drill == "slow-link")


def test_jobs_of_these_drills_last_and_are_compared_with_one_of_their_length(tmp_path: Path) -> None:
    cells = suite.cells("full", ["fsdp2-dp4"], ["cut-to-coordinator", "short-cut"])
    run: list[JobSpec] = []
    apart: list[JobSpec] = []
    runner = matrix_of(tmp_path, lambda _: "", run=lambda spec: bool(run.append(spec)), apart=apart)
    runner.measure(cells, lambda _: None)
    (reference,) = run
    assert {spec.train.steps for spec in (reference, *apart)} == {suite.LONG_STEPS}
    assert [spec.train.load_s for spec in (reference, *apart)] == [0.0, suite.LOAD_S, suite.LOAD_S]
    assert suite.LONG_STEPS * suite.LOAD_S > 2 * 2.0, "seconds: longer than it takes to notice silence by default"


# --- where there can be no such network ----------------------------------------------------------------------------------


class NoServers:
    """Nothing is started in these tests."""

    def of(self, framework: str) -> Any:
        return contextlib.nullcontext()


def matrix_of(
    directory: Path,
    unable: Callable[[bool], str],
    run: Callable[[JobSpec], int] = lambda _: 0,
    apart: list[JobSpec] | None = None,
) -> Matrix:
    def on_hosts(spec: JobSpec, cuts: Sequence[Cut]) -> int:
        assert cuts
        (apart if apart is not None else []).append(spec)
        return 0

    return Matrix(directory, NoServers(), keep=False, run=run, run_apart=on_hosts, unable=unable)  # type: ignore[arg-type]


def test_what_cannot_be_run_is_skipped_and_is_neither_good_nor_bad(tmp_path: Path) -> None:
    asked: list[bool] = []

    def unable(narrow: bool) -> str:
        asked.append(narrow)
        return "network namespaces need root" if not narrow else "there is no command 'tc' here"

    apart: list[JobSpec] = []
    runner = matrix_of(tmp_path, unable, apart=apart)
    outcomes = runner.measure(suite.cells("full", ["ddp-dp3"], DRILLS), lambda _: None)
    assert not apart, "nothing was tried"
    assert [(o.outcome, o.good, o.bad, o.right_verdict) for o in outcomes] == [
        (matrix.SKIPPED, False, False, None)
    ] * len(DRILLS)
    assert {o.detail for o in outcomes} == {"network namespaces need root", "there is no command 'tc' here"}
    assert sorted(asked) == [False, True], "once for each kind"
    result = matrix.as_json(outcomes, {})
    assert (result["good"], result["bad"], result["skipped"]) == (0, 0, len(DRILLS))


def test_the_command_skips_with_the_reason_and_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["run", "--suite", "full", "--layouts", "ddp-dp3", "--faults", *DRILLS]) == 0
    said = capsys.readouterr().out
    assert said.count("network namespaces need root") == 2 * len(DRILLS), "as it goes on, and in the table"
    assert "0 of 0 jobs came out as they have to, 6 were skipped" in said


def test_the_list_says_what_is_needed_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["list"]) == 0
    said = capsys.readouterr().out
    assert said.count("network namespaces: root, and the command ip") == len(DRILLS)
    assert "Faults of the network are skipped here: network namespaces need root." in said


def test_without_the_commands_there_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    monkeypatch.setattr(network, "_run", lambda *_: None)
    assert network.obstacle(False) == ""
    assert network.obstacle(True) == "there is no command 'tc' here: install iproute2"

    def refuse(*command: str) -> None:
        raise UsageError(f"{command[0]} failed: Operation not permitted")

    monkeypatch.setattr(network, "_run", refuse)
    assert network.obstacle(False).endswith("made here: ip failed: Operation not permitted")


# --- nothing is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted_at", range(1, 30))
def test_whenever_it_is_interrupted_every_namespace_is_removed(
    interrupted_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces: set[str] = set()
    calls = 0

    def pretend(*command: str) -> None:
        nonlocal calls
        calls += 1
        if command[:3] == ("ip", "netns", "add"):
            spaces.add(command[3])
        if command[:3] == ("ip", "netns", "delete"):
            if command[3] not in spaces:
                raise UsageError("no such namespace")
            spaces.remove(command[3])
        elif calls == interrupted_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(network, "_run", pretend)
    with pytest.raises(KeyboardInterrupt), network.network(["a", "b"]):
        assert len(spaces) == 3
        raise KeyboardInterrupt
    assert not spaces


def test_two_networks_have_no_name_in_common() -> None:
    assert network.Network(["a"]).space("a") != network.Network(["a"]).space("a")


def spaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"hotswap-{pid}-")]


def processes_in(spaces: set[int]) -> list[int]:
    """Of network namespaces, by inode number."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in spaces:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def job_on_hosts(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs one, as the matrix does."""
    program = f"""
from pathlib import Path
from hotswap.chaos import suite
from hotswap.chaos.cuts import run_on_hosts
(cell,) = suite.cells("full", ["ddp-dp3"], ["cut-node"])
run_on_hosts(suite.job_of(cell, Path({str(directory)!r}), 60.0), cell.ordeal.cuts)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@needs_hosts
def test_ctrl_c_leaves_neither_namespaces_nor_processes(tmp_path: Path) -> None:
    with job_on_hosts(tmp_path) as process:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("node?.log"))) < 4:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        names = spaces_of(process.pid)
        assert len(names) == 5, "four hosts, and what joins them"
        inodes = {Path("/run/netns", name.split()[0]).stat().st_ino for name in names}
        while len(processes_in(inodes)) < 4:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    assert spaces_of(process.pid) == []
    assert processes_in(inodes) == []


# --- one real job --------------------------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.e2e
def test_a_node_that_nobody_reaches_is_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hotswap.cli", "chaos", "run", "--suite", "full", "--layouts", "ddp-dp3"]
    process = subprocess.Popen(
        [*command, "--faults", "cut-node", "--json", "--keep", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out + err
    (cell,) = json.loads(out)["cells"]
    assert (cell["outcome"], cell["verdict"]) == ("identical", "node_fault of node2"), cell
    events = [json.loads(line) for line in (tmp_path / "cut-node-on-ddp-dp3/job/events.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "node_lost"] == ["silent for 2 s"]
    assert spaces_of(process.pid) == []
