"""What a collective costs through a stable group, compared with plain torch in the same processes.

    python benchmarks/collective_cost.py [--device cuda] [--output collective_cost.json]

Both groups of each process have the same members and run gloo on loopback, or with ``--device cuda`` NCCL on one GPU for each
process. Blocks of all-reduces alternate between the two, so that whatever else the machine does hits both; the ratio of
neighbouring blocks is what counts. A block on GPUs ends when its stream has done all of them. That the way is the same is also
shown without a clock: all Python and C functions entered by one all-reduce are listed for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotswap.comm import Groups
from hotswap.errors import PeerUnreachable
from overhead import bootstrap

WORLD = 2
SIZES = (1, 1024, 65536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=150, help="blocks of each kind and size")
    parser.add_argument("--calls", type=int, default=100, help="all-reduces in a block")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(1, WORLD):
            pid = os.fork()
            if pid == 0:
                measure(rank, Path(directory), arguments)
                os._exit(0)
            children.append(pid)
        result = measure(0, Path(directory), arguments)
        for pid in children:
            os.waitpid(pid, 0)
    show(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if not result["same_functions"]:
        sys.exit("a stable group enters other functions than plain torch does")


def measure(rank: int, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's part; rank 0's numbers are reported."""
    torch.set_num_threads(1)
    # Plain torch looks up its host name otherwise, and needs a store, which hotswap does without.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device(arguments.device, rank if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = Groups(slot=rank, world_size=WORLD, device=device if device.type == "cuda" else None)
    groups._no_store = dist.FileStore(str(directory / "store"), WORLD)  # type: ignore[attr-defined]
    groups.install()
    backend = "nccl" if device.type == "cuda" else "gloo"
    plain = dist.new_group(list(range(WORLD)), backend=backend)
    stable = dist.new_group(list(range(WORLD)))
    groups.connect(1, FileRendezvous(directory))
    entered = {name: entered_functions(group, device) for name, group in (("plain", plain), ("stable", stable))}
    rows = [compare(plain, stable, torch.zeros(elements, device=device), arguments) for elements in SIZES]
    groups.gate()
    return {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "backend": backend,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "same_functions": entered["plain"] == entered["stable"],
        "functions": entered["stable"],
        "all_reduce": rows,
    }


def compare(plain: Any, stable: Any, tensor: torch.Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """Alternate blocks of both kinds, each kind first in half of the pairs."""
    times: dict[str, list[float]] = {"plain": [], "stable": []}
    kinds = [("plain", plain), ("stable", stable)]
    for number in range(-4, arguments.blocks):
        for name, group in kinds if number % 2 else reversed(kinds):
            seconds = timed(lambda group=group: dist.all_reduce(tensor, group=group), arguments.calls)  # type: ignore[misc]
            if number >= 0:
                times[name].append(seconds)
    ratios = [a / b for a, b in zip(times["stable"], times["plain"], strict=True)]
    low, high = bootstrap(ratios, statistics.median)
    return {
        "elements": tensor.numel(),
        "plain_us": statistics.median(times["plain"]) * 1e6,
        "stable_us": statistics.median(times["stable"]) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def timed(action: Callable[[], object], calls: int) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        action()
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return (time.perf_counter() - began) / calls


def entered_functions(group: Any, device: torch.device) -> list[str]:
    """Every function, Python or C, that the interpreter enters during one all-reduce."""
    tensor = torch.zeros(1, device=device)
    entered: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            entered.append(f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}")
        elif event == "c_call":
            entered.append(f"C {argument.__qualname__}")

    dist.all_reduce(tensor, group=group)  # what runs only the first time
    sys.setprofile(note)
    dist.all_reduce(tensor, group=group)
    sys.setprofile(None)
    return entered


class FileRendezvous:
    """A rendezvous through files, good enough for two processes of one machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise PeerUnreachable(f"nobody published {key}")
            time.sleep(0.001)
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "_")


def show(result: dict[str, Any]) -> None:
    print(
        f"all-reduce between {WORLD} processes, torch {result['torch']}, {result['backend']} on {result['device']}, medians"
    )
    print(f"{'elements':>9} {'plain us':>9} {'stable us':>9} {'stable/plain (95 % interval)':>30}")
    for row in result["all_reduce"]:
        interval = f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
        print(f"{row['elements']:>9} {row['plain_us']:>9.1f} {row['stable_us']:>9.1f} {interval:>30}")
    verdict = "the same" if result["same_functions"] else "NOT the same"
    print(f"functions entered: {verdict} {len(result['functions'])} with and without hotswap, none of them hotswap's")


if __name__ == "__main__":
    main()
