"""What a launcher starts, how it supervises it, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_kit import Launched, alive, until

from hotswap.config import Timing
from hotswap.launch.job import streams_for
from hotswap.launch.place import free_port

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made: list[Launched] = []

    def begin(scripts: dict[str, str], where: str = "", **options: Any) -> Launched:
        made.append(Launched(tmp_path / where, scripts, **options))
        return made[-1]

    yield begin
    for launched in made:
        launched.close()


@pytest.mark.parametrize("code", [0, 1, 75, 93])
def test_the_jobs_exit_code_is_the_coordinators(launch: Launch, code: int) -> None:
    got, out, err = launch({"coordinator": f"exit {code}"}, nodes_active=2, nodes_max=3).finish()
    assert got == code
    assert out == ""
    assert (f"ended with {code}; logs in" in err) == bool(code)


def test_what_the_coordinator_warns_of_is_on_the_console(launch: Launch) -> None:
    got, _, err = launch({"coordinator": "warn nobody advances: slot 1 sleeps"}, nodes_active=2, nodes_max=3).finish()
    assert got == 0
    assert "hotswap: nobody advances: slot 1 sleeps\n" in err


def test_processes_are_told_what_they_need_and_no_secret_is_inherited(launch: Launch) -> None:
    secrets = {"HOTSWAP_TOKEN": "t" * 32, "HOTSWAP_FORK_SERVER": "/s", "HOTSWAP_FORK_SERVER_TOKEN": "u"}
    nodes = {"nodes_active": 2, "nodes_max": 3, "nproc_per_node": 4}
    environment = {**secrets, "KEPT": "1"}
    job = launch({"coordinator": "serve"}, role="trainer", fault_domain="rack1", environment=environment, **nodes)
    agents = [job.agent(f"node{index}") for index in range(3)]
    described = json.loads(until((job.folder / "job.json").exists) and (job.folder / "job.json").read_text())
    coordinator = job.coordinators()[0]
    for process in (*agents, coordinator):
        assert "KEPT" in process["environment"]
        assert not secrets.keys() & set(process["environment"])
    assert len({process["pgid"] for process in (*agents, coordinator)}) == 4, "each is a process group"
    configs = [agent["config"] for agent in agents]
    assert [config["node"] for config in configs] == ["node0", "node1", "node2"]
    for config in configs:
        assert config["entry"] == ["train.py", "--epochs", "3"]
        assert (config["nodes_active"], config["nproc_per_node"], config["fault_domain"]) == (2, 4, "rack1")
        assert config["coordinator_port"] == described["coordinators"][0][1]
        assert config["fork_server"] is None
        assert config["env"]["ROLE_NAME"] == "trainer"
    assert len({config["env"]["MASTER_PORT"] for config in configs}) == 1, "the same for all nodes"
    job.process.terminate()
    job.finish()


def test_other_commands_can_find_the_job_but_strangers_cannot(launch: Launch) -> None:
    job = launch({"coordinator": "serve"}, nodes_max=2)
    until((job.folder / "job.json").exists)
    described = json.loads((job.folder / "job.json").read_text())
    pids = json.loads((job.folder / "pids.json").read_text())
    token = job.agent("node0")["config"]["token"]
    assert described["job_id"] == "job" and [host for host, _ in described["coordinators"]] == ["127.0.0.1"]
    assert Path(described["token_file"]).read_text() == token
    assert token not in (job.folder / "job.json").read_text()
    for path in (job.folder / "job.json", Path(described["token_file"])):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pids["agents"] == {name: job.agent(name)["pid"] for name in ("node0", "node1")}
    job.process.terminate()
    job.finish()
    assert not Path(described["token_file"]).exists()


def test_a_crashed_coordinator_is_started_again_on_its_port(launch: Launch) -> None:
    job = launch({"coordinator": "crash 9\ncrash 11\nexit 0"})
    code, _, err = job.finish()
    assert code == 0
    ports = [start["port"] for start in job.coordinators()]
    assert ports[0] == 0 and len(ports) == 3 and ports[1] == ports[2] != 0
    assert err.count("starting it again, training goes on") == 2


def test_a_coordinator_that_keeps_crashing_is_given_up(launch: Launch) -> None:
    job = launch({"coordinator": "crash 9"})
    code, _, err = job.finish()
    assert code == 1
    assert "the coordinator died 21 times, the last time with status -9" in err and "coordinator.log" in err


def test_a_coordinator_that_cannot_start_is_quoted(launch: Launch) -> None:
    code, _, err = launch({"coordinator": "refuse cannot serve on 10.9.8.7: no such address"}).finish()
    assert code == 2
    assert "the coordinator did not start: cannot serve on 10.9.8.7: no such address (log: " in err
    assert "Traceback" not in err


def test_a_lost_node_is_not_started_again(launch: Launch) -> None:
    job = launch({"coordinator": "serve", "node1": "exit 1"}, nodes_active=2, nodes_max=3)
    job.agent("node1")
    lost = job.agent("node1")["pid"]
    until(lambda: not alive(lost))
    job.process.terminate()
    assert job.finish()[0] == 128 + signal.SIGTERM
    assert job.agent("node1")["pid"] == lost


def test_when_all_nodes_are_lost_the_job_can_be_requeued(launch: Launch) -> None:
    scripts = {"coordinator": "serve", "node0": "exit 1", "node1": "exit 0"}
    assert launch(scripts, nodes_active=2, nodes_max=2).finish()[0] == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_stops_the_job_politely(launch: Launch, number: signal.Signals) -> None:
    job = launch({"coordinator": "serve"}, nodes_active=2, nodes_max=2)
    job.agent("node1")
    # As a terminal sends it: to the launcher's whole process group.
    os.killpg(job.process.pid, number)
    code, _, err = job.finish()
    assert code == 128 + number
    assert (job.folder / "stopped").exists(), "the coordinator was asked, and agents left because it said so"
    assert "Traceback" not in err


def test_only_the_signals_that_were_named_are_handled(launch: Launch) -> None:
    job = launch({"coordinator": "serve"}, signals=[int(signal.SIGUSR2)])
    job.agent("node0")
    job.process.send_signal(signal.SIGUSR2)
    assert job.finish()[0] == 128 + signal.SIGUSR2


def test_who_does_not_leave_is_ended_with_its_workers(launch: Launch) -> None:
    job = launch({"coordinator": "serve", "node0": "stubborn"})
    agent = job.agent("node0")
    job.process.send_signal(signal.SIGINT)
    until((job.folder / "stopped").exists)
    assert alive(agent["pid"]) and alive(agent["worker"])
    # Pressed again: no more patience.
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 128 + signal.SIGINT


def test_nothing_outlives_a_killed_launcher(launch: Launch) -> None:
    job = launch({"coordinator": "serve", "node1": "serve"}, nodes_active=2, nodes_max=2)
    pids = [job.agent(name)["pid"] for name in ("node0", "node1")]
    pids.append(until(job.coordinators)[0]["pgid"])
    job.process.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_the_outcome_as_json(launch: Launch) -> None:
    job = launch({"coordinator": "exit 75"}, json=True)
    code, out, err = job.finish()
    assert code == 75 and err == ""
    assert json.loads(out) == {
        "exit_code": 75,
        "job_id": "job",
        "log_dir": str(job.folder),
        "events": str(job.folder / "events.jsonl"),
        "report": None,  # the fake coordinator has written no events
    }


def test_a_usage_error_leaves_no_trace(launch: Launch, tmp_path: Path) -> None:
    job = launch({}, standalone=False, log_dir=str(tmp_path / "unused"))
    code, _, err = job.finish()
    assert code == 2 and "needs --rdzv-endpoint HOST:PORT" in err
    assert not (tmp_path / "unused").exists()


def test_notices_and_the_place_of_the_logs_are_said(launch: Launch) -> None:
    job = launch({}, log_dir="", notices=["a notice"])
    assert job.process.stderr is not None
    said = [job.process.stderr.readline() for _ in range(2)]
    (logs,) = [path for path in job.temporary.iterdir() if path.name.startswith("hotswap-logs-")]
    job.process.terminate()
    job.process.wait()
    assert said == ["hotswap: a notice\n", f"hotswap: logs are in {logs}/job\n"]


# --- several launchers -------------------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef"


def among_others(port: int, **options: Any) -> dict[str, Any]:
    common = {"standalone": False, "nodes_active": 2, "nodes_max": 2, "token": TOKEN, "node_name": "host"}
    return {**common, "endpoint": f"127.0.0.1:{port}", **options}


def test_the_second_launcher_of_a_machine_joins_the_first(launch: Launch) -> None:
    port = free_port()
    first = launch({"coordinator": "serve"}, "1", **among_others(port))
    assert first.agent("host")["config"]["coordinator_port"] == port
    second = launch({"coordinator": "serve", "host-2": "exit 7"}, "2", **among_others(port))
    assert second.finish()[0] == 7, "without a coordinator of its own, a launcher ends with its agent"
    first.process.terminate()
    assert first.finish()[0] == 128 + signal.SIGTERM


def test_a_launcher_that_must_have_the_coordinator_does_not_join(launch: Launch) -> None:
    port = free_port()
    first = launch({"coordinator": "serve"}, "1", **among_others(port))
    first.agent("host")
    code, _, err = launch({"coordinator": "serve"}, "2", **among_others(port, node_rank=0)).finish()
    assert code == 2 and "Address already in use" in err
    first.process.terminate()
    first.finish()


def test_a_node_without_the_coordinator_leaves_politely(launch: Launch) -> None:
    job = launch({"host": "serve"}, **among_others(1, node_rank=1))
    assert job.agent("host")["config"]["coordinator_host"] == "127.0.0.1"
    assert job.coordinators() == []
    job.process.terminate()
    assert job.finish()[0] == 128 + signal.SIGTERM


def test_commands_are_told_of_all_coordinators(launch: Launch) -> None:
    elsewhere = {"endpoint": "", "coordinators": ["127.0.0.1:1", "127.0.0.2:2"]}
    job = launch({"host": "serve"}, **{**among_others(1), **elsewhere})
    until((job.folder / "job.json").exists)
    described = json.loads((job.folder / "job.json").read_text())
    assert described["coordinators"] == [["127.0.0.1", 1], ["127.0.0.2", 2]]
    assert described["takeover_s"] > Timing().lease_s + Timing().detection_budget_s
    job.process.terminate()
    job.finish()


@pytest.mark.parametrize(
    ("processors", "workers", "streams"), [(2, 2, 2), (32, 2, 4), (96, 8, 3), (224, 8, 7), (224, 1, 8)]
)
def test_replicas_take_as_many_connections_as_there_are_processors_for(
    processors: int, workers: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert streams_for(workers) == streams


def test_a_job_without_a_name_has_the_same_one_everywhere(launch: Launch) -> None:
    names = set()
    for where in ("1", "2"):
        job = launch({}, where, **among_others(1, node_rank=1, job_id=""))
        found = until(lambda logs=job.folder.parent: list(logs.glob("job-*/host.json")))  # type: ignore[misc]
        names.add(found[0].parent.name)
        job.process.terminate()
        job.finish()
    assert len(names) == 1


def test_a_stand_alone_job_has_nobody_to_take_over_from_this_machine(launch: Launch) -> None:
    job = launch({"coordinator": "serve"}, nodes_active=2, nodes_max=2)
    job.agent("node1")
    # A scheduler's notice ends nothing, neither here nor in the processes below.
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.finish()
    assert code == 128 + signal.SIGTERM
    assert err.count("SIGUSR1: all nodes of this job are here") <= 1
    assert (job.folder / "stopped").exists()
