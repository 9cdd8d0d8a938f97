"""Which nodes are not started, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.diagnosis.history import save
from hotswap.diagnosis.policy import History
from hotswap.diagnosis.probes import ProbeResult, Status
from hotswap.errors import HotswapError, UsageError
from hotswap.launch import admission


def test_a_node_in_quarantine_is_told_until_when_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    save(History(quarantined={"b": 1_000_000.0}), path)
    with pytest.raises(HotswapError, match=r"node b is in quarantine until 1970-01-12 13:46 UTC.*history.json"):
        admission.require_not_quarantined("b", path, now=999_999.0)
    admission.require_not_quarantined("b", path, now=1_000_001.0)
    admission.require_not_quarantined("a", path, now=0.0)
    admission.require_not_quarantined("a", tmp_path / "missing.json")


def test_a_damaged_history_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot read the history of nodes"):
        admission.require_not_quarantined("a", path)


def test_a_node_that_fails_a_probe_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(*statuses: Status) -> tuple[ProbeResult, ...]:
        return tuple(
            ProbeResult(name=f"probe{n}", status=status, detail="why", seconds=0.1, measured={})
            for n, status in enumerate(statuses)
        )

    monkeypatch.setattr(admission, "run_probes", lambda: results(Status.PASSED, Status.SKIPPED))
    admission.require_healthy("a")
    monkeypatch.setattr(admission, "run_probes", lambda: results(Status.PASSED, Status.FAILED))
    with pytest.raises(HotswapError, match="node a does not take part, for it is not healthy: probe1: why"):
        admission.require_healthy("a")
