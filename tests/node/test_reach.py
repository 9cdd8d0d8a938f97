from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from agent_kit import bench, holder, play

from hotswap.config import Timing
from hotswap.core import messages as m
from hotswap.core.types import Endpoint
from hotswap.node.reach import unreachable


def test_who_takes_no_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as full:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            gone = closed.getsockname()[1]
        ports = {"there": there.getsockname()[1], "gone": gone}
        endpoints = {name: Endpoint(host="127.0.0.1", port=port) for name, port in ports.items()}
        # Never answered: a listener whose queue is full drops what comes.
        full.listen(0)
        waiting = [socket.socket() for _ in range(2)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        endpoints["silent"] = Endpoint(host="127.0.0.1", port=full.getsockname()[1])
        assert asyncio.run(unreachable(endpoints, 0.3)) == ("gone", "silent")
        assert asyncio.run(unreachable({}, 0.3)) == ()
        for client in waiting:
            client.close()


@pytest.mark.parametrize("probe", [False, True])
def test_an_answer_to_a_fence_says_whom_this_node_reaches_if_it_was_asked(
    probe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, timing=Timing(detection_budget_s=0.5)) as it:
            it.peer = holder(tmp_path)
            await it.register()
            nowhere = Endpoint(host="127.0.0.1", port=1)
            endpoints = {"a#1": nowhere, "b#1": it.peers_endpoint, "c#1": nowhere}
            it.tell(m.Fence(generation=1, places=("a#1", "b#1"), endpoints=endpoints, probe=probe))
            assert (await it.hear(m.NodeFenced)).unreachable == (("c#1",) if probe else ())

    play(scenario())
