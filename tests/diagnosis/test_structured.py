"""What kubectl and Slurm print as JSON is evidence with node and time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import Diagnosis, diagnose
from hotswap.diagnosis.readers import read_paths, read_text
from hotswap.diagnosis.structured import read_structured


def _ended(reason: str, code: int, message: str = "") -> dict[str, Any]:
    return {
        "terminated": {"reason": reason, "exitCode": code, "finishedAt": "2026-03-02T10:00:00Z", "message": message}
    }


def _pod(*states: dict[str, Any], **status: Any) -> dict[str, Any]:
    containers = [{"name": "trainer", "state": state} for state in states]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"nodeName": "gpu-7"},
        "status": {"containerStatuses": containers, **status},
    }


def _node(*conditions: tuple[str, str, str], taints: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "gpu-7"},
        "spec": {"taints": [{"key": key, "effect": "NoExecute"} for key in taints]},
        "status": {
            "conditions": [
                {"type": kind, "status": holds, "reason": reason, "message": "so it is"}
                for kind, holds, reason in conditions
            ]
        },
    }


def _event(reason: str, message: str, kind: str = "Warning") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"host": "gpu-7"},
        "involvedObject": {"kind": "Pod", "name": "train-3"},
        "lastTimestamp": "2026-03-02T10:00:00Z",
        "count": 3,
    }


def _list(*items: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def _diagnosed(data: object) -> Diagnosis:
    return diagnose(read_text(json.dumps(data)))


@pytest.mark.parametrize(
    ("data", "verdict", "node"),
    [
        (_pod(_ended("OOMKilled", 137)), "oom_host", "gpu-7"),
        (_pod(_ended("Error", 139)), "process_fault", "gpu-7"),
        (_pod(_ended("Error", 1, "Traceback (most recent call last):\nKeyError: 'loss'")), "user_error", "gpu-7"),
        (_pod({"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}), "user_error", "gpu-7"),
        (_pod(reason="Evicted", message="The node was low on resource: memory."), "oom_host", "gpu-7"),
        (
            _pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]),
            "preemption",
            None,
        ),
        (_node(("Ready", "Unknown", "NodeStatusUnknown")), "node_fault", "gpu-7"),
        (
            _node(("Ready", "True", "KubeletReady"), ("ReadonlyFilesystem", "True", "FilesystemIsReadOnly")),
            "node_fault",
            "gpu-7",
        ),
        (_node(taints=("node.kubernetes.io/unreachable",)), "node_fault", "gpu-7"),
        (_list(_event("FailedMount", "MountVolume.SetUp failed for volume data")), "storage", None),
        (_list(_event("NodeNotReady", "Node is not ready", "Normal")), "node_fault", "gpu-7"),
        ({"meta": {}, "jobs": [{"state": {"current": ["TIMEOUT"], "reason": "None"}}]}, "preemption", None),
        ({"jobs": [{"job_state": "NODE_FAIL", "state_reason": "NodeDown"}]}, "node_fault", None),
        ({"nodes": [{"name": "gpu-7", "state": ["DOWN"], "reason": "Not responding"}]}, "node_fault", "gpu-7"),
    ],
)
def test_a_document_is_understood(data: dict[str, Any], verdict: str, node: str | None) -> None:
    found = _diagnosed(data)
    assert found.verdict.value == verdict, found
    assert node is None or found.culprit.node == node


@pytest.mark.parametrize(
    "data",
    [
        _pod(_ended("Completed", 0)),
        _pod({"running": {"startedAt": "2026-03-02T10:00:00Z"}}),
        _node(("Ready", "True", "KubeletReady"), ("MemoryPressure", "False", "KubeletHasSufficientMemory")),
        _list(_event("Pulled", "image is there", "Normal")),
        {"jobs": [{"state": {"current": ["COMPLETED"]}}]},
        {"nodes": [{"name": "gpu-7", "state": ["IDLE"]}]},
        {"apiVersion": "v1", "kind": "List", "items": []},
    ],
)
def test_a_healthy_document_is_no_confident_verdict(data: dict[str, Any]) -> None:
    assert not _diagnosed(data).confident


def test_counts_and_times_are_kept() -> None:
    (found,) = read_structured(json.dumps(_event("BackOff", "again")).encode(), source="events") or []
    assert (found.count, found.time, found.source) == (3, 1772445600.0, "events")


def test_a_document_larger_than_the_tail_is_still_one(tmp_path: Path) -> None:
    events = [_event("Pulled", "x" * 500, "Normal") for _ in range(2000)]
    path = tmp_path / "events.json"
    path.write_text(json.dumps(_list(*events, _event("FailedMount", "MountVolume.SetUp failed"))))
    assert diagnose(read_paths([str(path)])).verdict.value == "storage"


def test_what_only_looks_like_a_document_is_read_as_text() -> None:
    assert diagnose(read_text('{"message": "half of it\nRuntimeError: CUDA error: uncorrectable ECC error')).confident


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["kind", "items", "status", "spec", "conditions", "containerStatuses", "state", "terminated", "jobs", "nodes",
                 "message", "apiVersion", "metadata", "taints", "reason", "lastState", "exitCode"]
            ),
            inner | st.sampled_from(["Pod", "Node", "Event", "List"]),
            max_size=6,
        ),
        max_leaves=20,
    )
)  # fmt: skip
def test_no_document_breaks_the_reader(data: object) -> None:
    read_structured(json.dumps(data).encode(), source="x")


def test_lines_below_a_heading_are_about_its_node() -> None:
    text = """NodeName=gpu-3 Arch=x86_64
   State=IDLE ThreadsPerCore=2
NodeName=gpu-7 Arch=x86_64
   State=DOWN* ThreadsPerCore=2
   Reason=Not responding [slurm@2026-03-02T10:11:12]
JobId=9 JobName=train
   JobState=PENDING Reason=Resources"""
    found = diagnose(read_text(text))
    assert found.culprit.node == "gpu-7"
    assert [one.node for one in read_text(text) if "JobState" in one.text or "Resources" in one.text] == [None]


def test_the_signal_in_a_reason_of_slurm() -> None:
    found = diagnose(read_text("JobId=7 JobName=x\n   JobState=FAILED Reason=RaisedSignal:9(Killed) Dependency=(null)"))
    assert found.rules[0] == "slurm.job-killed"
