"""Two loss curves in plain characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

BOTH, REFERENCE, RUN, MARK = "●", "○", "x", "┊"


def draw(
    reference: Sequence[float], run: Sequence[float], *, mark: int | None = None, width: int = 64, height: int = 10
) -> list[str]:
    """Lines of a chart over steps. *mark*: a step to point out. Empty if there is nothing to draw."""
    values = [*reference, *run]
    if not values:
        return []
    steps = max(len(reference), len(run))
    width = min(width, max(2, 3 * steps))
    top, bottom = max(values), min(values)
    grid = [[" "] * width for _ in range(height)]

    def column(step: int) -> int:
        return round(step * (width - 1) / max(1, steps - 1))

    def row(value: float) -> int:
        return round((top - value) / (top - bottom or 1.0) * (height - 1))

    if mark is not None and mark < steps:
        for line in grid:
            line[column(mark)] = MARK
    for step, value in enumerate(reference):
        grid[row(value)][column(step)] = REFERENCE
    for step, value in enumerate(run):
        same = step < len(reference) and reference[step] == value
        grid[row(value)][column(step)] = BOTH if same else RUN
    labels = [f"{top:7.3f} ", *[" " * 8] * (height - 2), f"{bottom:7.3f} "]
    lines = [f"{label}│{''.join(line).rstrip()}" for label, line in zip(labels, grid, strict=True)]
    axis = f"{'':8}└{'─' * width}"
    return [*lines, axis, f"{'':9}0{'step':^{max(4, width - 2)}}{steps - 1}", f"{'':9}{_legend(mark)}"]


def _legend(mark: int | None) -> str:
    parts = [f"{BOTH} both runs, bit for bit", f"{REFERENCE} undisturbed", f"{RUN} disturbed"]
    return "   ".join([*parts, *([f"{MARK} death"] if mark is not None else [])])
