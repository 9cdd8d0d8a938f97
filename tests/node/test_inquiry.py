"""A verdict for every recovery, from what the job and its agents know; late or missing words hold nothing up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.messages import Clue, WorkerEvidence
from hotswap.diagnosis.decode import decode
from hotswap.diagnosis.history import load
from hotswap.node import inquiry
from hotswap.node.inquiry import Inquiry

Diagnosed = list[dict[str, Any]]


def run(scenario: Callable[[Inquiry], Any]) -> Diagnosed:
    written: Diagnosed = []

    def write(event: str, fields: Mapping[str, Any]) -> None:
        assert event == "diagnosed"
        written.append(dict(fields))

    async def whole() -> None:
        made = Inquiry(write)
        await scenario(made)
        await made.close()

    asyncio.run(whole())
    return written


def exception(text: str) -> tuple[Clue, ...]:
    kind, facts = decode(text)
    return (
        Clue(kind=kind, source="slot0.err", order=2, text=text, facts=facts),
        Clue(kind="line", source="slot0.err", order=1, text="Traceback (most recent call last):"),
    )


def lose(
    made: Inquiry, slot: int, status: int, node: str = "a#1", generation: int = 2, detail: str = "killed by SIGKILL"
) -> None:
    made.saw("worker_lost", {"slot": slot, "node": node, "status": status, "detail": detail})
    made.saw("recovery_started", {"generation": generation, "cause": "a loss"})


def test_an_error_of_the_script_is_the_scripts() -> None:
    async def scenario(made: Inquiry) -> None:
        lose(made, 0, 1)
        made.hear("a#1", WorkerEvidence(slot=0, clues=exception("KeyError: 'lr'")))
        made.saw("recovery_done", {"generation": 2})
        await asyncio.sleep(0)

    (found,) = run(scenario)
    assert (found["generation"], found["verdict"], found["action"]) == (2, "user_error", "stop_with_report")
    assert found["rules"] and found["deciding"][0]["text"] == "KeyError: 'lr'"
    assert found["culprit"]["rank"] == 0


def test_a_worker_that_its_agent_has_ended_is_not_one_that_the_kernel_has_killed() -> None:
    async def scenario(made: Inquiry) -> None:
        why = "slot 1 has not entered operation 7 of dp"
        made.saw("hang_found", {"generation": 1, "why": why, "culprits": [1], "waiting": [0, 2], "at": {}})
        lose(made, 1, -9, detail=f"hung: {why}")
        made.hear("a#1", WorkerEvidence(slot=1, clues=()))

    (found,) = run(scenario)
    assert found["verdict"] == "unknown"
    assert (found["culprit"]["rank"], found["rules"]) == (1, [])


def test_a_node_that_is_gone_is_to_blame_and_not_who_waited_for_it() -> None:
    async def scenario(made: Inquiry) -> None:
        made.saw("node_lost", {"node": "b#1", "role": "active", "reason": "connection closed"})
        lose(made, 0, -9)
        made.hear(
            "a#1",
            WorkerEvidence(
                slot=0,
                clues=(Clue(kind="line", source="slot0.err", text="Connection closed by peer [10.0.0.2]:41230"),),
            ),
        )

    (found,) = run(scenario)
    assert found["verdict"] == "node_fault"
    assert found["culprit"]["node"] == "b"


def test_an_unexplained_kill_is_not_called_certain() -> None:
    async def scenario(made: Inquiry) -> None:
        lose(made, 0, -9)
        made.hear("a#1", WorkerEvidence(slot=0, clues=()))

    (found,) = run(scenario)
    assert not found["confident"]
    assert found["action"] not in ("replace_node", "stop_with_report")


def test_each_recovery_has_its_own_verdict() -> None:
    async def scenario(made: Inquiry) -> None:
        for generation, slot in ((2, 0), (3, 1)):
            lose(made, slot, 1, generation=generation)
            made.hear("a#1", WorkerEvidence(slot=slot, clues=exception("KeyError: 'lr'")))
            made.saw("recovery_done", {"generation": generation})
            await asyncio.gather(*made._tasks)

    assert [found["generation"] for found in run(scenario)] == [2, 3]


def test_words_are_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "PATIENCE_S", 0.2)

    async def late(made: Inquiry) -> None:
        lose(made, 0, 1)
        made.saw("recovery_done", {"generation": 2})
        await asyncio.sleep(0.05)
        made.hear("a#1", WorkerEvidence(slot=0, clues=exception("KeyError: 'lr'")))

    async def never(made: Inquiry) -> None:
        lose(made, 0, 1)

    assert run(late)[0]["verdict"] == "user_error"
    began = time.monotonic()
    assert len(run(never)) == 1
    assert time.monotonic() - began < 5.0


def test_a_gpu_that_the_kernel_names_is_to_blame() -> None:
    async def scenario(made: Inquiry) -> None:
        lose(made, 0, 1)
        text = "NVRM: Xid (PCI:0000:3d:00): 79, pid=77, GPU has fallen off the bus."
        xid = Clue(kind="xid", source="kernel log", text=text, gpu="0000:3d:00", facts={"code": 79})
        made.hear("a#1", WorkerEvidence(slot=0, clues=(*exception("RuntimeError: CUDA error: unspecified"), xid)))

    (found,) = run(scenario)
    assert (found["verdict"], found["confident"], found["action"]) == ("node_fault", True, "replace_node")
    assert found["culprit"] == {"kind": "gpu", "node": "a", "gpu": "0000:3d:00"}


def test_faults_of_nodes_are_kept_for_later_jobs(tmp_path: Path) -> None:
    path = tmp_path / "history.json"

    async def job() -> None:
        made = Inquiry(lambda *_: None, path)
        made.saw("node_lost", {"node": "b#7", "role": "active", "reason": "silent"})
        await made.close()

    asyncio.run(job())
    first = load(path)
    assert "b" in first.quarantined
    asyncio.run(job())
    assert sum(one.faults for one in load(path).burdens.values()) > sum(one.faults for one in first.burdens.values())


@pytest.mark.parametrize("content", ["no history", '{"version": 99}'])
def test_a_history_that_is_none_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(content)

    async def job() -> None:
        made = Inquiry(lambda *_: None, path)
        made.saw("node_lost", {"node": "b#7", "role": "active", "reason": "silent"})
        await made.close()

    asyncio.run(job())
    assert path.read_text() == content


def test_without_a_loss_there_is_nothing_to_say() -> None:
    async def scenario(made: Inquiry) -> None:
        made.saw("recovery_started", {"generation": 1, "cause": "start"})
        made.saw("recovery_done", {"generation": 1})

    assert run(scenario) == []


def test_a_broken_rule_costs_a_line_in_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a rule is broken")

    async def scenario(made: Inquiry) -> None:
        lose(made, 0, 1)
        made.hear("a#1", WorkerEvidence(slot=0, clues=()))

    monkeypatch.setattr(inquiry, "diagnose", fail)
    assert run(scenario) == []
