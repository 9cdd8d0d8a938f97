from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.core.transitions import Kind, Phase
from hotswap.sim.protocol_docs import SECTIONS, main, render, state_diagram, transition_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_document_says_what_the_code_says() -> None:
    assert main(["--check", str(DOCUMENT)]) == 0, "run make docs and review the difference"


def test_an_outdated_document_is_noticed_and_can_be_brought_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "protocol.md"
    old.write_text(DOCUMENT.read_text().replace("| heartbeat |", "| heart attack |"))
    assert main(["--check", str(old)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([str(old)]) == 0
    assert old.read_text() == DOCUMENT.read_text()
    assert main([str(old)]) == 0


def test_a_missing_marker_is_an_error() -> None:
    text = "\n".join(f"<!-- generated: {name} -->\n<!-- end: {name} -->" for name in list(SECTIONS)[1:])
    with pytest.raises(ValueError, match="state diagram"):
        render(text)


def test_nothing_is_left_out() -> None:
    for phase in Phase:
        assert phase.value in transition_table()
        assert phase is Phase.STOPPED or phase.name.lower() in state_diagram()
    for kind in Kind:
        assert kind.value in transition_table()
