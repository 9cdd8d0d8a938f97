"""Files that a process reads when it starts again: whatever they hold, it starts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap.core.past import recall
from hotswap.diagnosis.history import load
from hotswap.errors import UsageError
from hotswap.node.eventlog import EventLog

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["event", "generation", "resume_step", "x"]), inner, max_size=4),
    ),
    max_leaves=8,
)
LINE = st.one_of(
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.sampled_from(
        [b"[" * 100_000, b"9" * 10_000, b'{"event": "recovery_planned", "generation": 3, "resume_step": 2}']
    ),
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINE, max_size=6))
def test_any_event_log_is_read(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join(lines))
    log = EventLog(path, go_on=True)
    past = recall(log.read())
    log.close()
    assert past.generation >= 0
    assert all(isinstance(generation, int) and isinstance(step, int) for generation, step in past.plans)


def test_a_good_line_counts_whatever_stands_around_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = b'{"event": "recovery_planned", "generation": 3, "resume_step": 2}'
    path.write_bytes(b"\n".join([b"[1]", b"null", b"[" * 100_000, b"\xff", good, b'"text"', b'{"event":']))
    log = EventLog(path, go_on=True)
    assert recall(log.read()).plans == ((3, 2),)
    log.close()


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        LINE,
        st.tuples(JSON, JSON).map(
            lambda both: json.dumps({"version": 1, "faults": both[0], "quarantined": both[1]}).encode()
        ),
    )
)
def test_any_history_of_nodes_is_one_or_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(text)
    with suppress(UsageError):
        load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 1, "faults": [], "quarantined": [1]}'])
def test_a_damaged_history_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="history of nodes"):
        load(path)
