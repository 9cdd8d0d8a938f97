"""Transcripts that a person can review: every change of what the coordinator does shows up as a changed line."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario import Scenario

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    replayed = Scenario(text).run()
    if request.config.getoption("--regenerate-transcripts"):
        path.write_text(replayed)
        return
    assert replayed == text, f"{path.name} differs; if it is meant to, run pytest --regenerate-transcripts"


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) > 20


@pytest.mark.parametrize("log", ["an empty log", "an old log"])
def test_a_log_that_was_not_written_is_none(log: str) -> None:
    """On a full disk there is none, or it ends early; it must not be taken for the whole story."""
    text = (Path(__file__).parent / "transcripts" / "coordinator_restarts_without_the_log.txt").read_text()
    replayed = Scenario(text.replace("> coordinator restarts", f"> coordinator restarts with {log}")).run()
    assert replayed.replace(f" with {log}", "") == text
