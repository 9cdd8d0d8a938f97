"""A check of a node while it trains: what it says, how often, and that nothing of it costs anybody anything."""

from __future__ import annotations

import asyncio

import pytest

from hotswap.core.messages import NodeChecked
from hotswap.node import check
from hotswap.node.check import NodeCheck


def asked(monkeypatch: pytest.MonkeyPatch, *, times: int = 1, pause_s: float = 60.0) -> list[NodeChecked]:
    sent: list[NodeChecked] = []
    monkeypatch.setattr(check, "PAUSE_S", pause_s)

    async def scenario() -> None:
        one = NodeCheck("n1#3", sent.append, probes=("memory_errors",))
        await one.close()
        for _ in range(times):
            one.ask("suspected")
            one.ask("suspected again at once")
            assert one._task is not None
            await one._task
        await one.close()

    asyncio.run(scenario())
    return sent


def test_the_outcome_is_sent_as_clues(monkeypatch: pytest.MonkeyPatch) -> None:
    ((clue, *others),) = [one.clues for one in asked(monkeypatch)]
    assert (clue.kind, clue.facts) == ("probe", {"name": "memory_errors", "ok": True})
    assert all(other.kind != "probe" for other in others)


def test_a_node_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(asked(monkeypatch, times=2)) == 1
    assert len(asked(monkeypatch, times=2, pause_s=0.0)) == 2


def test_a_check_that_cannot_be_made_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no process can be started")

    monkeypatch.setattr(check, "run_probes", fail)
    assert asked(monkeypatch) == []


def test_only_what_disturbs_nobody_is_looked_at() -> None:
    assert not {"gpu_compute", "gpu_memory", "gpu_collective"} & set(check.PROBES)
