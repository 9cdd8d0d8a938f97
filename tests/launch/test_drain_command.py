"""``hotswap drain`` against a coordinator that is one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_kit import TOKEN, coordinator_of_job, describe_job, port_of

from hotswap.cli import main
from hotswap.core import messages as m
from hotswap.core.commands import Drain, Inject
from hotswap.wire.channels import control_codec
from hotswap.wire.handshake import accept_link


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """The log directory of a job that waits for its nodes."""
    with coordinator_of_job(tmp_path, nodes=1):
        yield tmp_path


def test_a_node_that_is_not_there(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", str(logs), "node7"]) == 2
    assert "there is no node 'node7' in this job; there are none" in capsys.readouterr().err


def test_another_jobs_token(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "token").write_text("f" * 32)
    assert main(["drain", str(logs), "node7"]) == 1
    assert "token" in capsys.readouterr().err
    # The coordinator has counted it, and serves on.
    (logs / "token").write_text(TOKEN)
    assert main(["drain", str(logs), "node7"]) == 2
    refused = [line for line in (logs / "events.jsonl").read_text().splitlines() if "connection_refused" in line]
    assert len(refused) == 1


def test_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", str(tmp_path), "node7"]) == 2
    assert "is not the log directory of a running job" in capsys.readouterr().err


class Standby(threading.Thread):
    """A coordinator that does not lead: it names the one at *leader*, or none; or hangs up when it has been told."""

    def __init__(self, leader: int | None = None, *, silent: bool = False) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.says = m.Follow(term=1, host="127.0.0.1", port=leader) if leader is not None else m.Follow(term=0)
        self.silent = silent
        self.asked = 0

    def __enter__(self) -> Standby:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                asyncio.run(self.answer(sock))

    async def answer(self, sock: socket.socket) -> None:
        link = await accept_link(sock, control_codec(), TOKEN, 10.0)
        assert isinstance(await link.receive(), (Drain, Inject))
        self.asked += 1
        if not self.silent:
            link.send(self.says)
            await link.flush(10.0)
        link.close()


def nobody() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_coordinator_that_does_not_lead_names_the_one_that_does(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Standby(port_of(logs)) as standby:
        describe_job(logs, [standby.port])
        assert main(["drain", str(logs), "node7"]) == 2
    assert "there is no node 'node7' in this job" in capsys.readouterr().err
    assert standby.asked == 1


def test_the_first_is_gone_the_second_leads_not_and_the_third_does(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Standby() as standby:
        describe_job(logs, [nobody(), standby.port, port_of(logs)])
        assert main(["drain", str(logs), "node7"]) == 2
    assert "there is no node 'node7' in this job" in capsys.readouterr().err
    assert standby.asked == 1


def test_a_host_that_answers_nothing_costs_a_moment(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotswap.launch.command.TRY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        describe_job(logs, [deaf.getsockname()[1], port_of(logs)])
        assert main(["drain", str(logs), "node7"]) == 2
    assert "there is no node 'node7' in this job" in capsys.readouterr().err


@pytest.mark.parametrize("leads", ["nobody", "one that is gone", "one that says that another does"])
def test_who_was_asked_is_said_if_none_leads(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    monkeypatch.setattr("hotswap.launch.command.TRY_S", 0.5)
    gone = nobody()
    with Standby() as one, Standby(gone if leads == "one that is gone" else None) as two:
        if leads == "one that says that another does":
            two.says = m.Follow(term=1, host="127.0.0.1", port=one.port)
        describe_job(logs, [gone, one.port, two.port])
        assert main(["drain", str(logs), "node7"]) == 1
    said = capsys.readouterr().err
    assert (
        "no coordinator of this job leads" in said and "Training goes on without one. See that one of them runs" in said
    )
    assert f"127.0.0.1:{gone} cannot be reached" in said
    assert f"127.0.0.1:{one.port} cannot decide now and knows of nobody who can" in said
    if leads == "nobody":
        assert f"127.0.0.1:{two.port} cannot decide now and knows of nobody who can" in said
    else:
        assert f"127.0.0.1:{two.port} does not lead and says that 127.0.0.1:{two.says.port} does" in said
    assert one.asked > 1 and two.asked > 1, "as long as one may still come to lead"


def test_a_strangers_process_at_an_old_address_does_not_end_the_search(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with coordinator_of_job(other, nodes=1, token="e" * 32):
        describe_job(logs, [port_of(other), port_of(logs)])
        assert main(["drain", str(logs), "node7"]) == 2
        assert "there is no node 'node7' in this job" in capsys.readouterr().err


def test_only_what_may_be_told_twice_is(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Standby(silent=True) as lost:
        describe_job(logs, [lost.port, port_of(logs)])
        assert main(["drain", str(logs), "node7"]) == 2
        assert "there is no node 'node7' in this job" in capsys.readouterr().err
        assert main(["inject", str(logs), "node", "--node", "node7"]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{lost.port} was told, and was lost before it answered" in said
    assert "it may have obeyed, so look at the event log before you try again" in said
