"""How often the diagnosis is right, and how fast it reads.

``python benchmarks/diagnosis.py cases CASES.jsonl`` prints a confusion matrix over labelled cases, one JSON object a line with
``verdict``, ``also_ok``, ``basis`` and ``log``. ``python benchmarks/diagnosis.py speed [--mib 2048]`` makes a log of that size with a
failure near its end, and one with an error on every line (half of them with words that never come again), and reads both with
``hotswap classify`` and with grep on the same literals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from hotswap.diagnosis import Verdict, diagnose
from hotswap.diagnosis.cause import default_book
from hotswap.diagnosis.policy import Action, History, decide
from hotswap.diagnosis.readers import literals_of, read_text

DECIDED = ("thread", "maintainer", "log")
RIGHT_MIN = 0.95
CONFIDENT_ON_UNKNOWN_MAX = 0.05


OUTPUT_CHARS_MAX = 1 << 20


def score(path: Path) -> int:
    matrix: dict[str, Counter[str]] = defaultdict(Counter)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    confident = wrong_node = wrong_user = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        answer = diagnose(read_text(case["log"]))
        action = decide(answer, History(), 0.0).action
        basis = "decided" if case["basis"] in DECIDED else case["basis"]
        matrix[case["verdict"]][answer.verdict.value] += 1
        total[basis] += 1
        right[basis] += answer.verdict.value in (case["verdict"], *case["also_ok"])
        confident += basis == "none" and answer.confident
        wrong_node += case["verdict"] == "user_error" and action is Action.REPLACE
        wrong_user += case.get("kind", "").startswith(("xid", "sxid")) and answer.verdict is Verdict.USER_ERROR
        if basis == "decided" and answer.verdict.value not in (case["verdict"], *case["also_ok"]):
            print(f"wrong: {case['id']}: {case['verdict']}, said {answer.verdict.value} ({answer.confidence})")
    _print_matrix(matrix)
    share = right["decided"] / max(1, total["decided"])
    unsure = confident / max(1, total["none"])
    print(f"decided by thread, maintainer or log: {right['decided']} of {total['decided']} right ({share:.1%})")
    print(f"inferred: {right['inferred']} of {total['inferred']}")
    print(f"confident on what nobody knows: {confident} of {total['none']} ({unsure:.1%})")
    print(f"node replaced for a user's error: {wrong_node}; user's error for an Xid or SXid: {wrong_user}")
    return int(share < RIGHT_MIN or unsure > CONFIDENT_ON_UNKNOWN_MAX or wrong_node > 0 or wrong_user > 0)


def _print_matrix(matrix: dict[str, Counter[str]]) -> None:
    names = [verdict.value for verdict in Verdict]
    print("label \\ answer".ljust(16) + "".join(name[:12].rjust(14) for name in names))
    for label in names:
        print(label.ljust(16) + "".join(str(matrix[label][name] or ".").rjust(14) for name in names))


def write_log(path: Path, size: int) -> None:
    """A training log: steps, transport messages, checkpoints, warnings, and one failure at nine tenths of it."""
    draw = random.Random(0)
    block = "".join(_sentence(draw, number) for number in range(60_000)).encode()
    failure = b"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    with path.open("wb") as file:
        written = 0
        while written < size:
            if written >= 0.9 * size and failure:
                file.write(failure)
                failure = b""
            # Other numbers in every copy, as in a real log.
            written += file.write(
                block.translate(bytes.maketrans(b"0123456789", bytes(draw.sample(range(48, 58), 10))))
            )


def _sentence(draw: random.Random, number: int) -> str:
    kind = draw.random()
    if kind < 0.6:
        return (
            f"[default7]: iteration {number:8d}/  115311 | consumed samples: {number * 2048:12d} | elapsed time per iteration (s): "
            f"{draw.uniform(104, 106):.2f} | learning rate: 5.279E-05 | lm loss: {draw.uniform(2, 3):.6E} | grad norm: {draw.random():.3f} |\n"
        )
    if kind < 0.8:
        peers = f"{draw.randrange(512)}[{draw.randrange(8)}] -> {draw.randrange(512)}[{draw.randrange(8)}]"
        return f"node-{draw.randrange(64)}:{draw.randrange(99999)}:77 [{draw.randrange(8)}] NCCL INFO Channel 07/0 : {peers} via NET/IB/3\n"
    if kind < 0.95:
        return f"2026-03-04 12:30:{draw.randrange(60):02d} - trainer - INFO - wrote /ckpt/{draw.getrandbits(64):016x}/rank_{draw.randrange(512)}\n"
    return f"/env/torch/utils/checkpoint.py:{draw.randrange(999)}: UserWarning: None of the inputs have requires_grad=True\n"


FLOOD = (
    "[rank{n}]: RuntimeError: NCCL communicator was aborted on rank {n}\n",
    "node-{n}:{m}:77 [3] misc/socket.cc:46 NCCL WARN Call to recv from 10.0.{n}.7<{m}> failed : Connection reset by peer\n",
    "../aten/src/Indexing.cu:1284: gather: block: [{n},0,0], thread: [{m},0,0] Assertion `index < size` failed.\n",
    "2026-03-04 12:30:11 - {w} - ERROR - OSError: [Errno 5] Input/output error: '/data/{w}/{w}'\n",
    "worker of {w}: requests.exceptions.ReadTimeout: no answer about {w}\n",
    "ERROR {w} {w}: KeyError: '{w}'\n",
)
"""Half of them with ``{w}``, a word that is another one in every line."""
LETTERS = bytes(range(0x80, 0xC0))
"""Stand for letters until a copy of the block is written: other ones in every copy."""


def write_flood(path: Path, size: int) -> None:
    """A log with an error on every line."""
    draw = random.Random(0)
    block = b"".join(_error(draw, number) for number in range(30_000))
    with path.open("wb") as file:
        written = 0
        while written < size:
            letters = bytes(draw.choice(b"ghijklmnopqrstuvwxyz") for _ in LETTERS)
            digits = bytes(draw.sample(range(48, 58), 10))
            written += file.write(block.translate(bytes.maketrans(LETTERS + b"0123456789", letters + digits)))


def _error(draw: random.Random, number: int) -> bytes:
    before, *after = (
        FLOOD[number % len(FLOOD)].format(n=draw.randrange(99), m=draw.randrange(9999), w="\0").encode().split(b"\0")
    )
    return before + b"".join(bytes(draw.choices(LETTERS, k=8)) + rest for rest in after)


def speed(mib: int, folder: Path | None, output: Path | None) -> int:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        log = Path(place, "train.log")
        write_log(log, mib << 20)
        print("a training log:")
        ours = _side_by_side(log, rows)
        log.unlink()
        write_flood(log, mib << 20)
        print("an error on every line:")
        _side_by_side(log, rows)
    if output:
        load = round(os.getloadavg()[0], 1)
        output.write_text(
            json.dumps({"mib": mib, "load_average": load, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return int("uncorrectable ECC error" not in ours)


def _side_by_side(log: Path, rows: list[dict[str, object]]) -> str:
    size = log.stat().st_size
    literals = log.with_name("literals")
    literals.write_text("\n".join(sorted(literals_of(default_book()))) + "\n", encoding="utf-8")
    ours = _timed([sys.executable, "-m", "hotswap.cli", "classify", "--json", str(log)], size, "hotswap classify", rows)
    if shutil.which("grep"):
        _timed(["grep", "-a", "-F", "-f", str(literals), str(log)], size, "grep -F, same literals", rows)
        _timed(
            ["grep", "-a", "-E", "-f", str(_expressions(log.parent)), str(log)], size, "grep -E, same literals", rows
        )
    return ours


def _expressions(place: Path) -> Path:
    escaped = [
        "".join(f"[{c}]" if c in "*.?+()|{}$" else f"\\{c}" if c in "[]^\\" else c for c in one)
        for one in literals_of(default_book())
    ]
    path = place / "expressions"
    path.write_text("|".join(sorted(escaped)) + "\n", encoding="utf-8")
    return path


def _timed(command: list[str], size: int, name: str, rows: list[dict[str, object]]) -> str:
    """Runs on one processor, as grep does; prints bytes a second and the largest memory of the process."""
    before = os.times()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}, text=True, errors="replace"
    )
    assert process.stdout is not None
    output = process.stdout.read(OUTPUT_CHARS_MAX)
    while process.stdout.read(OUTPUT_CHARS_MAX):
        pass  # All is read, as a pager would; little is kept.
    process.wait()
    wall = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{name:24s} {size / 1e6 / wall:7.0f} MB/s wall  {size / 1e6 / cpu:7.0f} MB/s cpu  peak so far {peak:.0f} MiB"
    )
    rows.append(
        {
            "log_bytes": size,
            "program": name,
            "wall_s": round(wall, 2),
            "cpu_s": round(cpu, 2),
            "mb_per_cpu_s": round(size / 1e6 / cpu),
            "peak_so_far_mib": round(peak),
        }
    )
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cases = commands.add_parser("cases")
    cases.add_argument("path", type=Path)
    fast = commands.add_parser("speed")
    fast.add_argument("--mib", type=int, default=2048)
    fast.add_argument("--dir", type=Path, help="where the log is written; default: the system's")
    fast.add_argument("--output", type=Path, help="where the figures are written as JSON")
    arguments = parser.parse_args()
    if arguments.command == "cases":
        return score(arguments.path)
    return speed(arguments.mib, arguments.dir, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
