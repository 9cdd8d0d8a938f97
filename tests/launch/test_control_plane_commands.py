"""The command lines of ``hotswap coordinator`` and ``hotswap store``, and what ``hotswap run`` says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap import cli
from hotswap.config import CoordinatorConfig
from hotswap.launch.arguments import parse

TOKEN = "0123456789abcdef0123456789abcdef"
COORDINATOR = ["coordinator", "--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-id", "job", "--listen", "127.0.0.1:0"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_TOKEN", TOKEN)
    for name in ("HOTSWAP_ETCD_USER", "HOTSWAP_ETCD_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--nnodes", "x"], "--nnodes x"),
        (["--nnodes", "3:2"], "at least one node has to train"),
        (["--store", "redis://a"], "say etcd://"),
        (["--store-ca", "/x"], "need --store"),
        (["--store", "etcds://a:1", "--store-ca", "/nowhere"], "--store-ca /nowhere cannot be read"),
        (["--lease-s", "1"], "--lease-s 1: at least 3 s"),
        (["--listen", "0.0.0.0:0", "--store", "etcd://a:1"], "needs --advertise"),
        (["--token-file", "/nowhere"], "--token-file"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COORDINATOR, "--log-dir", str(tmp_path), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_store_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOTSWAP_TOKEN")
    assert cli.main(["store", "--file", str(tmp_path / "s"), "--listen", "127.0.0.1:0"]) == 2
    assert "the job's token is needed" in capsys.readouterr().err


def test_run_takes_the_store_and_the_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_ETCD_USER", "job")
    monkeypatch.setenv("HOTSWAP_ETCD_PASSWORD", "hidden")
    options = parse(["--nnodes", "2", "--rdzv-endpoint", "a:1,b:2", "--store", "etcd://e:1,f:2", "train.py"])
    assert options.store is not None and options.store.urls == ("http://e:1", "http://f:2")
    assert (options.store.user, options.store.password) == ("job", "hidden")
    assert "hidden" not in repr(options)
    options = parse(["--nnodes", "1", "--coordinator", "a:1, b", "train.py"])
    assert options.coordinators == ("a:1", "b:29400") and not options.standalone


def test_a_store_that_refuses_the_token_ends_the_coordinator_and_no_secret_is_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN[::-1])
    hotswap = [sys.executable, "-m", "hotswap.cli"]
    serve = [*hotswap, "store", "--file", str(tmp_path / "s"), "--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as store:
        assert store.stdout is not None
        port = int(store.stdout.readline().split(b":")[1].strip(b" }\n"))
        command = [*hotswap, *COORDINATOR, "--log-dir", str(tmp_path), "--store", f"tcp://127.0.0.1:{port}"]
        said = subprocess.run(command, check=False, capture_output=True, timeout=60, env=os.environ)
        store.terminate()
        assert store.wait(20) == 0
    assert said.returncode != 0 and b"does not know this job's token" in said.stderr
    assert TOKEN.encode() not in said.stdout + said.stderr


@pytest.mark.parametrize("flags", [[], ["--allow-inject"]])
def test_drills_are_allowed_only_by_name(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--standalone", *flags, "train.py"]).allow_inject is bool(flags)
    started: list[CoordinatorConfig] = []

    async def run(config: CoordinatorConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("hotswap.launch.control_plane.run_coordinator", run)
    assert cli.main([*COORDINATOR, "--log-dir", str(tmp_path), *flags]) == 0
    assert [config.allow_inject for config in started] == [bool(flags)]


def test_a_coordinator_decides_by_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[CoordinatorConfig] = []

    async def run(config: CoordinatorConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("hotswap.launch.control_plane.run_coordinator", run)
    told = [*COORDINATOR, "--log-dir", str(tmp_path)]
    flags = ["--replicas", "2", "--evict-slow", "3", "--rebuild", "all", "--checkpoint-dir", "/storage"]
    assert cli.main([*told, *flags]) == 0
    [config] = started
    assert (config.replicas, config.evict_slow, config.keep_groups, config.checkpoint_dir) == (
        2,
        3.0,
        False,
        "/storage",
    )
    assert cli.main([*told, "--replicas", "0"]) == 2
    assert cli.main([*told, "--evict-slow", "1"]) == 2
