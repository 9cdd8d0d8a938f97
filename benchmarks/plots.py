"""The figures of docs/performance.md, from the data beside them.

python benchmarks/plots.py        (needs the extra "bench")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

MEASURED = Path(__file__).parent.parent / "docs" / "measured"
PHASES = ("detect", "fence", "rebuild", "restore", "redo")
RECOVERIES = {
    "CPU, Megatron-Core, 8 workers": "recovery",
    "2 H200s, Megatron-Core": "recovery_h200_megatron",
    "2 H200s, Megatron-Core, interleaved": "recovery_h200_pp2",
    "2 H200s, Megatron-Core, tensor parallel": "recovery_h200_tp2",
    "2 H200s, FSDP2": "recovery_h200_fsdp2",
}
SYSTEMS = ("hotswap", "torchft", "nvrx")


def load(name: str) -> Any:
    """A file of measurements."""
    return json.loads((MEASURED / f"{name}.json").read_text())


def save(name: str) -> None:
    """Without dates or random names, so that the same data gives the same file."""
    plt.savefig(MEASURED / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close()


def phases() -> None:
    """Median length of each phase, one bar for each kind of death."""
    _, axes = plt.subplots(figsize=(8, 2.8))
    for label, name in RECOVERIES.items():
        kills = load(name)["kills"]
        for scope in ("node", "worker"):
            left, row = 0.0, f"{label}: {scope}"
            for number, phase in enumerate(PHASES):
                width = kills[scope][phase]["p50"]
                axes.barh(
                    row, width, left=left, color=f"C{number}", label=phase if row.endswith("FSDP2: node") else None
                )
                left += width
    axes.invert_yaxis()
    axes.set_xlabel("ms from the SIGKILL to the end of the first newly committed step, medians of phases")
    axes.legend(ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.4, 1), frameon=False)
    save("recovery_phases")


def overhead() -> None:
    """Ratio against how many bytes of snapshot there are for each millisecond of a step; of each program the newest run."""
    _, axes = plt.subplots(figsize=(6, 3))
    results = [run["result"] for run in load("overhead_h200")["runs"]]
    newest = {(result["program"], *result["sizes"].items(), result["nccl_over"]): result for result in results}
    for result in newest.values():
        low, high = result["interval"]
        demand = result["snapshot_mb"] / result["step_ms"]
        label = f"{result['program']}, step {result['step_ms']:.0f} ms, every {result['steps_apart']} steps"
        axes.errorbar(
            demand, result["ratio"], [[result["ratio"] - low], [high - result["ratio"]]], fmt="o", label=label
        )
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.axvline(55, color="grey", linewidth=0.5, linestyle=":")
    axes.annotate("what the bus carries", (55, 1.1), rotation=90, ha="right", fontsize=8)
    axes.set_xlabel("snapshot bytes / step time (GB/s)")
    axes.set_ylabel("step time, protected / bare")
    axes.legend(fontsize=8)
    save("overhead_h200")


def peers() -> None:
    """Median time over a plain step, default settings."""
    cells = [cell for cell in load("peers_cpu")["cells"] if not cell["tuned"] and cell["median_s"]]
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    _, axes = plt.subplots(figsize=(6, 2.8))
    for number, system in enumerate(SYSTEMS):
        heights = {cell["fault"]: cell["median_s"] for cell in cells if cell["system"] == system}
        places = [index + 0.25 * (number - 1) for index, fault in enumerate(faults) if fault in heights]
        axes.bar(places, [heights[fault] for fault in faults if fault in heights], 0.25, label=system)
    axes.set_yscale("log")
    axes.set_xticks(range(len(faults)), faults)
    axes.set_ylabel("s over a plain step")
    axes.legend(frameon=False)
    save("peers_cpu")


def main() -> None:
    """Draw all of them."""
    mpl.rcParams["svg.hashsalt"] = "hotswap"
    for draw in (phases, overhead, peers):
        draw()


if __name__ == "__main__":
    main()
