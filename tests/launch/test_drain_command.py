"""``hotswap drain`` against a coordinator that is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_kit import TOKEN, coordinator_of_job

from hotswap.cli import main
from hotswap.core import messages as m
from hotswap.core.commands import Drain
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
    """A coordinator that does not lead: it names the one at *leader*, or itself for ever."""

    def __init__(self, leader: int | None) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.leader = leader or self.port
        self.asked = 0

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                asyncio.run(self.answer(sock))

    async def answer(self, sock: socket.socket) -> None:
        link = await accept_link(sock, control_codec(), TOKEN, 10.0)
        assert isinstance(await link.receive(), Drain)
        self.asked += 1
        link.send(m.Follow(term=1, host="127.0.0.1", port=self.leader))
        await link.flush(10.0)
        link.close()


@pytest.mark.parametrize("somebody_leads", [True, False])
def test_a_coordinator_that_does_not_lead_names_the_one_that_does(
    logs: Path, capsys: pytest.CaptureFixture[str], somebody_leads: bool
) -> None:
    about = json.loads((logs / "job.json").read_text())
    standby = Standby(about["port"] if somebody_leads else None)
    standby.start()
    (logs / "job.json").write_text(json.dumps({**about, "port": standby.port}))
    code = main(["drain", str(logs), "node7"])
    standby.listener.close()
    said = capsys.readouterr().err
    if somebody_leads:
        assert code == 2 and "there is no node 'node7' in this job" in said
        assert standby.asked == 1
    else:
        assert code == 1 and "do not agree on who leads" in said
