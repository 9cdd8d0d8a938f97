from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.launch.console import Console, Follower

ALL = Console(redirects={}, tee={})


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "node0" / "gen1"
    folder.mkdir(parents=True)
    return folder


def test_whole_lines_are_shown_when_they_are_whole(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(logs.parents[1], ALL, 2)
    with (logs / "slot3.out").open("w", buffering=1) as out, (logs / "slot3.err").open("w") as err:
        out.write("one\ntw")
        out.flush()
        err.write("trouble\n")
        err.flush()
        follower.look()
        assert capsys.readouterr() == ("[slot3] one\n", "[slot3] trouble\n")
        follower.look()
        assert capsys.readouterr() == ("", "")
        out.write("o\nthree")
        out.flush()
        follower.look()
        assert capsys.readouterr().out == "[slot3] two\n"
    follower.close()
    assert capsys.readouterr().out == "[slot3] three\n"


def test_output_of_an_earlier_start_is_not_shown_again(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = logs / "slot0.out"
    path.write_text("old\n")
    follower = Follower(logs.parents[1], ALL, 1)
    with path.open("a") as file:
        file.write("new\n")
    follower.close()
    assert capsys.readouterr().out == "[slot0] new\n"


def test_only_what_is_asked_for_is_shown(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(logs.parents[1], Console(redirects={0: 1, 1: 3}, tee={1: 2}), 2)
    for slot in range(4):
        (logs / f"slot{slot}.out").write_text("out\n")
        (logs / f"slot{slot}.err").write_bytes(b"err \xff\n")
    follower.close()
    assert capsys.readouterr() == ("", "".join(f"[slot{slot}] err �\n" for slot in range(4)))


def test_output_that_is_not_text_is_shown(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "slot0.out").touch()
    follower = Follower(logs.parents[1], ALL, 1)
    (logs / "slot0.out").write_bytes(b"\xff\xfe\n")
    follower.close()
    assert capsys.readouterr().out == "[slot0] ��\n"
