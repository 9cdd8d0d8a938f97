from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap.sim.__main__ import SPOILT, main, seeds_of, simulate
from hotswap.sim.world import Pipe, World

SEEDS = 300
SEEDS_TO_BITE = 400
WHOLE = {"versions": 2, "gate": True, "drop_undone": True}


def test_every_promise_is_kept_under_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", f"0:{SEEDS}", "--json"]) == 0, capsys.readouterr().out
    result = json.loads(capsys.readouterr().out)
    assert result["seeds"] == SEEDS and result["failed"] == {}
    # A simulation in which nothing happens proves nothing.
    assert result["exit_codes"]["0"] > SEEDS / 2
    assert result["faults"] > SEEDS
    assert result["recoveries"] > SEEDS / 2


@pytest.mark.parametrize("part", SPOILT)
def test_the_checkers_notice_when_a_part_of_the_protocol_is_missing(part: str) -> None:
    whole = {**SPOILT[part], **{key: good for key, good in WHOLE.items() if key in SPOILT[part]}}
    bites = (
        seed for seed in range(SEEDS_TO_BITE) if simulate(seed, **SPOILT[part])[1] and not simulate(seed, **whole)[1]
    )
    assert next(bites, None) is not None, f"{SEEDS_TO_BITE} seeds do not notice that the protocol is spoilt: {part}"


def test_a_failing_seed_prints_its_transcript_and_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(SEEDS_TO_BITE) if simulate(seed, **SPOILT["one-version"])[1])
    assert main(["--seeds", str(seed), "--spoil", "one-version"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAULT" in line for line in lines)
    assert any("VIOLATION" in line for line in lines)
    assert lines[-1] == f"replay: python -m hotswap.sim --seeds {seed} --spoil one-version"


def digest(seed: int) -> str:
    return hashlib.sha256("\n".join(simulate(seed)[0].world.transcript).encode()).hexdigest()


def test_a_seed_replays_exactly_even_in_another_process() -> None:
    """Sets of strings come in another order in every process; nothing may depend on it."""
    digests = {digest(7), digest(7)}
    code = "from test_sim import digest; print(digest(7))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
        digests.add(out.stdout.strip())
    assert len(digests) == 1
    assert digest(8) not in digests


def test_seeds_are_one_or_a_range() -> None:
    assert list(seeds_of("7")) == [7]
    assert list(seeds_of("3:6")) == [3, 4, 5]


def test_a_pipe_keeps_the_order_and_loses_only_the_end() -> None:
    for seed in range(50):
        world = World(seed)
        arrived: list[int] = []
        pipe = Pipe(world, (0.0, 1.0), arrived.append)
        for number in range(10):
            world.after(0.1 * number, pipe.send, number)
        world.after(0.75, pipe.cut)
        world.run(100.0)
        assert arrived == list(range(len(arrived)))
        assert len(arrived) <= 8
