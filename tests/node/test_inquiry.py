"""A verdict for every recovery, from what the job and its agents know; late or missing words hold nothing up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.events import Advice, Judged
from hotswap.core.messages import Clue, NodeChecked, WorkerEvidence
from hotswap.diagnosis.decode import decode
from hotswap.diagnosis.history import load
from hotswap.node import inquiry
from hotswap.node.inquiry import Inquiry

Diagnosed = list[dict[str, Any]]


def run(scenario: Callable[[Inquiry], Any], advised: list[Judged] | None = None) -> Diagnosed:
    written: Diagnosed = []

    def write(event: str, fields: Mapping[str, Any]) -> None:
        assert event in ("diagnosed", "node_checked")
        written.append(dict(fields))

    async def whole() -> None:
        made = Inquiry(write, advise=(advised if advised is not None else []).append)
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
    assert found["verdict"] == "process_fault" and not found["confident"]
    assert (found["culprit"]["rank"], found["rules"]) == (1, ["job.worker-hung"])


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
    monkeypatch.setattr(inquiry, "PATIENCE_AT_END_S", 0.2)

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
    assert first.quarantined == {}, "a node may vanish for a thousand reasons, once"
    asyncio.run(job())
    then = load(path)
    assert sum(one.faults for one in then.burdens.values()) > sum(one.faults for one in first.burdens.values())
    assert "b" in then.quarantined


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


def test_the_loss_of_a_spare_has_a_verdict_of_its_own() -> None:
    async def scenario(made: Inquiry) -> None:
        made.saw("node_lost", {"node": "c#1", "role": "spare", "reason": "connection closed"})
        await asyncio.sleep(0)
        made.saw("node_lost", {"node": "b#1", "role": "active", "reason": "connection closed"})
        made.saw("recovery_started", {"generation": 2, "cause": "b#1 lost"})

    of_spare, of_recovery = sorted(run(scenario), key=lambda found: found["of"], reverse=True)
    assert (of_spare["of"], of_spare["culprit"]["node"]) == ("spare", "c")
    assert (of_recovery["of"], of_recovery["culprit"]["node"]) == ("recovery", "b")


def test_a_spare_whose_loss_is_answered_by_a_recovery_is_what_broke() -> None:
    async def scenario(made: Inquiry) -> None:
        made.saw("node_lost", {"node": "c#1", "role": "spare", "reason": "it kept the replicas"})
        made.saw("recovery_started", {"generation": 2, "cause": "c#1 lost"})
        made.saw("recovery_done", {"generation": 2})

    (found,) = run(scenario)
    assert (found["of"], found["culprit"]["node"], found["generation"]) == ("recovery", "c", 2)


def test_members_that_a_new_coordinator_misses_are_lost() -> None:
    async def scenario(made: Inquiry) -> None:
        made.saw("coordinator_took_over", {"members": 1, "missing": ["b#1"]})
        made.saw("recovery_started", {"generation": 2, "cause": "the coordinator restarted"})
        made.saw("recovery_done", {"generation": 2})

    (found,) = run(scenario)
    assert (found["verdict"], found["culprit"]["node"]) == ("node_fault", "b")


def test_what_the_script_raises_is_judged_at_once_and_again_in_the_end() -> None:
    advised: list[Judged] = []
    ends: list[int] = []

    async def scenario(made: Inquiry) -> None:
        made.saw("script_raised", {"slot": 1, "node": "a#1", "error": "KeyError: 'lr'"})
        made.saw(
            "script_raised",
            {"slot": 3, "node": "b#1", "error": "RuntimeError: CUDA error: uncorrectable ECC error encountered"},
        )
        await asyncio.gather(*made._tasks)
        ends.append(len(advised))

    (found,) = run(scenario, advised)
    assert {(one.advice, one.slot, one.host) for one in advised[: ends[0]]} == {
        (Advice.GIVE_UP, 1, ""),
        (Advice.EXCLUDE, -1, "b"),
    }
    assert (found["verdict"], found["culprit"]["node"]) == ("node_fault", "b")


def test_errors_of_a_thousand_slots_are_not_read_one_by_one() -> None:
    async def scenario(made: Inquiry) -> None:
        for slot in range(inquiry.ERRORS_READ_MAX + 9):
            made.saw("script_raised", {"slot": slot, "node": "a#1", "error": "KeyError: 'lr'"})
        assert len(made._tasks) == inquiry.ERRORS_READ_MAX

    advised: list[Judged] = []
    (found,) = run(scenario, advised)
    assert (found["verdict"], len(advised)) == ("user_error", inquiry.ERRORS_READ_MAX)


def test_a_failed_check_is_proof() -> None:
    advised: list[Judged] = []

    async def scenario(made: Inquiry) -> None:
        good = Clue(kind="probe", source="probe disk", text="probe disk passed", facts={"name": "disk", "ok": True})
        made.hear_check("a#1", NodeChecked(clues=(good,)))
        bad = Clue(
            kind="probe",
            source="probe clock",
            text="probe clock failed: off by 7 s",
            facts={"name": "clock", "ok": False},
        )
        made.hear_check("b#2", NodeChecked(clues=(good, bad)))

    first, second, verdict = run(scenario, advised)
    assert (first["node"], first["failed"]) == ("a#1", [])
    assert (second["node"], second["failed"]) == ("b#2", ["probe clock failed: off by 7 s"])
    assert (verdict["of"], verdict["verdict"], verdict["rules"][0]) == ("check", "node_fault", "job.probe-failed")
    assert [(one.advice, one.host) for one in advised] == [(Advice.EXCLUDE, "b")]


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

    async def raised(made: Inquiry) -> None:
        made.saw("script_raised", {"slot": 0, "node": "a#1", "error": "KeyError: 'lr'"})

    monkeypatch.setattr(inquiry, "diagnose", fail)
    assert run(scenario) == run(raised) == []


def test_a_drill_is_held_against_nobody(tmp_path: Path) -> None:
    async def struck(made: Inquiry, node: str) -> None:
        made.saw("drill", {"generation": 1, "fault": "worker", "slot": 0, "node": node, "reason": "by ann"})
        for generation in (2, 3):
            lose(made, 0, -9, generation=generation)
            made.hear("a#1", WorkerEvidence(slot=0, clues=()))
            made.saw("recovery_done", {"generation": generation})
            await asyncio.gather(*made._tasks)

    def history(node: str) -> tuple[Diagnosed, float]:
        path, written = tmp_path / f"nodes{node}", Diagnosed()

        async def whole() -> None:
            made = Inquiry(lambda _, fields: written.append(dict(fields)), path)
            await struck(made, node)
            await made.close()

        asyncio.run(whole())
        return written, sum(burden.faults for burden in load(path).burdens.values())

    said, faults = history("a#1")
    assert [one["drill"] for one in said] == [True, False], "one drill excuses one fault"
    assert round(faults) == 1
    said, faults = history("")
    assert [one["drill"] for one in said] == [False, False], "the coordinator was struck, nobody's node"
    assert round(faults) == 2
