from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.node.gpus import share, visible


def test_the_gpus_are_those_named_or_those_there(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible({}, tmp_path) == ("2", "10")
    assert visible({"CUDA_VISIBLE_DEVICES": "3, GPU-5f"}, tmp_path) == ("3", "GPU-5f")
    assert visible({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(
    ("gpus", "width", "expected"),
    [
        (["0", "1", "2", "3"], 1, ["0", "1", "2", "3", "0"]),
        (["0", "1", "2", "3"], 2, ["0,1", "2,3", "0,1", "2,3", "0,1"]),
        (["5", "7"], 4, ["5,7"] * 5),
        (["0", "1", "2"], 2, ["0,1", "2,0", "1,2", "0,1", "2,0"]),
    ],
)
def test_positions_share_gpus_only_where_there_are_too_few(gpus: list[str], width: int, expected: list[str]) -> None:
    assert [share(gpus, position, width)["CUDA_VISIBLE_DEVICES"] for position in range(5)] == expected


def test_without_gpus_nothing_is_said_about_them() -> None:
    assert share((), 0, 2) == {}
