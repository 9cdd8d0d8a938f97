"""Every flag of torchrun is honoured, without effect and said so, or refused with what to do instead."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from hotswap.config import Timing
from hotswap.errors import UsageError
from hotswap.launch.arguments import HONOURED, NO_EFFECT, REFUSED, parse
from hotswap.launch.console import ERR, OUT
from hotswap.launch.options import Options

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSWAP_TOKEN", raising=False)


def ask(*flags: str) -> Options:
    return parse([*flags, "train.py", "--lr", "1"])


def test_there_is_a_verdict_on_every_flag_of_torchrun() -> None:
    flags = {action.dest for action in get_args_parser()._actions} - {"help"}
    # Flags that only newer or older versions of torch have may be in the tables too.
    assert flags <= HONOURED | NO_EFFECT.keys() | REFUSED.keys()
    assert not HONOURED & NO_EFFECT.keys() and not HONOURED & REFUSED.keys() and not NO_EFFECT.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-python"], "--no-python is not supported: .*Python script"),
        (["--run-path"], "--run-path"),
        (["--virtual-local-rank"], "LOCAL_RANK"),
        (["--numa-binding", "node"], "NUMA"),
        (["--nnodes", "0"], "at least one node"),
        (["--nnodes", "3:2"], "--nnodes 3:2"),
        (["--nnodes", "two"], "--nnodes two"),
        (["--nnodes", "1:2:3"], "--nnodes 1:2:3"),
        (["--nproc-per-node", "0"], "at least one worker"),
        (["--nproc-per-node", "some"], "--nproc-per-node some"),
        (["--detection-budget-s", "0.1"], "every pause of a scheduler"),
        (["--detection-budget-s", "nan"], "--detection-budget-s nan"),
        (["--detection-budget-s", "inf"], "--detection-budget-s inf"),
        (["--hang-budget-s", "never"], "--hang-budget-s never: a number of seconds, 'auto' or 'off'"),
        (["--spare-positions", "-1"], "--spare-positions -1: must be 0 or more"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--spare-wait-s", "nan"], "--spare-wait-s nan"),
        (["--transfer-streams", "-1"], "--transfer-streams -1: must be 0 or more"),
        (["--checkpoint-dir", "d"], "both --checkpoint-dir and --checkpoint-interval"),
        (["--checkpoint-interval", "5"], "both --checkpoint-dir and --checkpoint-interval"),
        (["--rdzv-conf", "join_timeout=soon"], "join_timeout=soon is not a number"),
        (["--rdzv-id", "../elsewhere"], "--rdzv-id '../elsewhere'"),
        (["--redirects", "7"], "--redirects"),
        (["--tee", "0:9"], "--tee"),
        (["--local-ranks-filter", "all"], "--local-ranks-filter"),
        (["--signals-to-handle", "SIGNONSENSE"], "SIGNONSENSE"),
        (["--drain-on", "SIGNONSENSE"], "--drain-on: there is no signal"),
        (["--drain-on", "SIGTERM", "--standalone"], "--drain-on: all nodes of a stand-alone job are on this machine"),
        (["--drain-wait-s", "-1"], "--drain-wait-s"),
        (["--nnodes", "4", "--min-nodes", "4"], "--min-nodes 4: say a number from 1 to 3"),
        (["--nnodes", "4", "--min-nodes", "-1"], "--min-nodes -1: say a number from 1 to 3"),
        (["--nnodes", "1", "--min-nodes", "1"], "a job of one node has no fewer"),
        (["--nnodes", "5", "--min-nodes", "2"], "--min-nodes 2: no number of nodes from 2 to 4 divides the 5"),
        (["--nnodes", "4", "--min-nodes", "2"], "--min-nodes needs --checkpoint-dir"),
        (["--token-file", "/does/not/exist"], "--token-file: .*No such file"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask(*flags)


def test_fewer_nodes_are_asked_for_with_storage() -> None:
    flags = ("--nnodes", "6", "--checkpoint-dir", "d", "--checkpoint-interval", "5")
    assert ask(*flags).min_nodes == 0
    assert ask(*flags, "--min-nodes", "2").min_nodes == 2


def test_a_refused_flag_is_refused_from_torchruns_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    with pytest.raises(UsageError, match="--no-python"):
        ask()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--monitor-interval", "5"], "--monitor-interval has no effect: the death of a worker"),
        (["--start-method", "fork"], "--start-method has no effect"),
        (["--rdzv-backend", "c10d"], "--rdzv-backend has no effect: the coordinator"),
        (["--event-log-handler", "console"], "--event-log-handler has no effect"),
        (["--logs-specs", "default"], "--logs-specs has no effect"),
        (["--duplicate-stdout-filters", "x"], "--duplicate-stdout-filters has no effect"),
        (["--rdzv-conf", "timeout=3,join_timeout=5"], "--rdzv-conf timeout has no effect"),
    ],
)
def test_what_changes_nothing_is_said(flags: list[str], said: str) -> None:
    assert [notice for notice in ask(*flags).notices if said in notice]


def test_an_ordinary_line_has_nothing_to_say() -> None:
    assert (
        ask("--standalone", "--nnodes", "2:3", "--nproc-per-node", "4", "--rdzv-conf", "join_timeout=5").notices == ()
    )


def test_the_number_of_cpu_threads_is_said_when_nobody_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ask().notices == ()
    assert "one CPU thread" in ask("--nproc-per-node", "2").notices[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"nodes_active": 1, "nodes_max": 1, "nproc_per_node": 1, "standalone": True, "respawns_max": 3}),
        (["--nnodes", "8:10"], {"nodes_active": 8, "nodes_max": 10, "standalone": False}),
        (["--nnodes", "2", "--standalone"], {"nodes_active": 2, "nodes_max": 2, "standalone": True}),
        (["--nnodes", "1", "--rdzv-endpoint", "h:1"], {"standalone": False, "endpoint": "h:1"}),
        (["--nproc_per_node", "4"], {"nproc_per_node": 4}),
        (["--max-restarts", "0"], {"respawns_max": 0}),
        (["--hang-budget-s", "off"], {"timing": Timing(hang_s=0)}),
        (["--hang-budget-s", "9", "--pause-limit-s", "99"], {"timing": Timing(hang_s=9, pause_s=99)}),
        (["--collective-timeout-s", "90"], {"timing": Timing(collective_s=90)}),
        (["--rdzv-id", "job7", "--role", "trainer"], {"job_id": "job7", "role": "trainer"}),
        (["--rdzv-conf", "join_timeout=30"], {"join_s": 30.0}),
        (["--node-rank", "2"], {"node_rank": 2}),
        (["--master-addr", "10.0.0.1"], {"endpoint": "10.0.0.1:29501", "master_port": 29500}),
        (["--master-addr", "10.0.0.1", "--master-port", "700"], {"endpoint": "10.0.0.1:701", "master_port": 700}),
        (["--master-addr", "fe80::1"], {"endpoint": "[fe80::1]:29501"}),
        (["--master-addr", "10.0.0.1", "--rdzv-endpoint", "h:9"], {"endpoint": "h:9"}),
        (["--local-addr", "10.0.0.2"], {"bind_host": "10.0.0.2"}),
        (["--local-addr", "10.0.0.2", "--bind-host", "10.0.0.3"], {"bind_host": "10.0.0.3"}),
        (["--log-dir", "logs"], {"log_dir": "logs"}),
        (["--signals-to-handle", "SIGTERM, SIGUSR2"], {"signals": (signal.SIGTERM, signal.SIGUSR2)}),
        (["--drain-on", "SIGTERM"], {"drain_on": (signal.SIGTERM,), "drain_s": 60.0}),
        (["--drain-wait-s", "5", "--standalone"], {"drain_on": (signal.SIGUSR1,), "drain_s": 5.0}),
        (["--shutdown-timeout", "7"], {"stop_s": 7.0}),
        (["--preload", "torch,mine"], {"preload": ("torch", "mine")}),
        (["--preload", ""], {"preload": ()}),
        (["--no-preload"], {"preload": None}),
        (["--json"], {"json": True, "console": None}),
        (["--spare-positions", "2", "--fault-domain", "rack1"], {"spare_positions": 2, "fault_domain": "rack1"}),
        (
            ["--checkpoint-dir", "/c", "--checkpoint-interval", "5"],
            {"checkpoint_dir": "/c", "checkpoint_interval_steps": 5},
        ),
    ],
)
def test_flags_mean_what_they_say(flags: list[str], expected: dict[str, Any]) -> None:
    found = ask(*flags)
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_entry_is_everything_after_the_flags() -> None:
    assert parse(["--standalone", "train.py", "--nnodes", "7"]).entry == ("train.py", "--nnodes", "7")
    assert parse(["-m", "pkg.train", "x"]).entry == ("-m", "pkg.train", "x")


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], {(0, OUT), (0, ERR), (1, OUT), (1, ERR)}),
        (["--redirects", "3"], set()),
        (["--redirects", "1"], {(0, ERR), (1, ERR)}),
        (["--redirects", "0:3"], {(1, OUT), (1, ERR)}),
        (["--redirects", "3", "--tee", "1:2"], {(1, ERR)}),
        (["--local-ranks-filter", "1"], {(1, OUT), (1, ERR)}),
    ],
)
def test_output_is_shown_as_torchrun_shows_it(flags: list[str], shown: set[tuple[int, int]]) -> None:
    console = ask("--nproc-per-node", "2", *flags).console
    assert console is not None
    assert {(rank, stream) for rank in (0, 1) for stream in (OUT, ERR) if console.shows(rank, stream)} == shown


def test_the_token_comes_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        ask("--token-file", str(path))
    path.chmod(0o600)
    found = ask("--token-file", str(path))
    assert found.token == TOKEN and found.token_file == str(path)
    assert TOKEN not in repr(found)
    path.write_text("short")
    with pytest.raises(UsageError, match="fewer than 16 bytes"):
        ask("--token-file", str(path))


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_TOKEN", TOKEN)
    assert ask().token == TOKEN
    monkeypatch.setenv("HOTSWAP_TOKEN", "short")
    with pytest.raises(UsageError, match=r"\$HOTSWAP_TOKEN: the token has fewer"):
        ask()
