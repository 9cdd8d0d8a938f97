from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap.sim.cli import SPOILT, main, seeds_of, simulate, simulate_all
from hotswap.sim.faults import AMONG_SEVERAL, KINDS

SEEDS = 500
SEEDS_WITH_MANY_FAULTS = 100
SEEDS_TO_BITE = 500


@pytest.mark.parametrize(("first", "count", "faults"), [(0, SEEDS, None), (20_000, SEEDS_WITH_MANY_FAULTS, 12)])
def test_every_promise_is_kept_under_every_seed(
    first: int, count: int, faults: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = [] if faults is None else ["--faults", str(faults)]
    code = main(["--seeds", f"{first}:{first + count}", "--jobs", "1", "--json", *extra])
    out = capsys.readouterr()
    assert code == 0, out.err + out.out
    result = json.loads(out.out)
    assert result["seeds"] == count and result["failed"] == {}
    # A simulation in which nothing happens proves nothing.
    assert result["exit_codes"]["0"] > count / 2
    assert result["recoveries"] > count / 2
    assert result["faults"].keys() == KINDS.keys() | AMONG_SEVERAL.keys()
    assert sum(result["faults"].values()) > count


@pytest.mark.parametrize("part", SPOILT)
def test_the_checkers_notice_when_a_part_of_the_protocol_is_missing(part: str) -> None:
    left_out = ("versions", "gate", "all_holders", "checked", "drop_undone", "drop_resized", "lease", "keep_agreed")
    whole = {name: value for name, value in SPOILT[part].items() if name not in left_out}
    bites = (seed for seed in range(SEEDS_TO_BITE) if simulate(seed, **SPOILT[part]).violation)
    failed = next(bites, None)
    assert failed is not None, f"{SEEDS_TO_BITE} seeds without a violation although the protocol is spoilt: {part}"
    assert simulate(failed, **whole).violation == "", "the same seed must be good with the whole protocol"


def test_a_failing_seed_prints_its_transcript_and_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = SPOILT["one-version"]
    seed = next(seed for seed in range(SEEDS_TO_BITE) if simulate(seed, **spoilt).violation)
    assert main(["--seeds", str(seed), "--spoil", "one-version"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAULT" in line for line in lines)
    assert any("VIOLATION" in line for line in lines)
    assert lines[-1] == f"replay: hotswap simulate --seed {seed} --spoil one-version"
    assert main(["--seed", str(seed), "--spoil", "one-version", "--json"]) == 1
    replayed = capsys.readouterr()
    assert list(json.loads(replayed.out)["failed"]) == [str(seed)]
    assert [line for line in lines if " FAULT" in line] == [
        line for line in replayed.err.splitlines() if " FAULT" in line
    ]


def digest(seed: int) -> str:
    return hashlib.sha256("\n".join(simulate(seed, with_transcript=True).transcript).encode()).hexdigest()


def digests() -> list[str]:
    return [digest(seed) for seed in range(7, 17)]


def test_a_seed_replays_exactly_even_in_another_process() -> None:
    """Sets of strings come in another order in every process; nothing may depend on it."""
    found = {tuple(digests()), tuple(digests())}
    code = "from test_sim import digests; print(*digests())"
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
        found.add(tuple(out.stdout.split()))
    assert len(found) == 1
    assert len(set(*found)) == 10


def test_processes_share_the_seeds() -> None:
    alone = list(simulate_all(range(40), jobs=1))
    assert list(simulate_all(range(40), jobs=2)) == alone
    assert [outcome.seed for outcome in alone] == list(range(40))


def test_seeds_are_one_or_a_range() -> None:
    assert list(seeds_of("7")) == [7]
    assert list(seeds_of("3:6")) == [3, 4, 5]
