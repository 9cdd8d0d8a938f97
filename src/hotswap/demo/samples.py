"""Which samples are planned for which step and data-parallel rank; plain arithmetic, shared with the checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How the samples of one step are cut: microbatches of ``rows`` samples of ``tokens`` tokens for each data-parallel rank."""

    dp_size: int
    microbatches: int
    rows: int
    tokens: int

    @property
    def samples_per_step(self) -> int:
        """Samples of a global batch."""
        return self.dp_size * self.microbatches * self.rows


def planned_ids(shape: BatchShape, step: int, dp_rank: int) -> list[int]:
    """Ids of the samples that data-parallel rank *dp_rank* consumes in *step*."""
    share = shape.microbatches * shape.rows
    first = step * shape.samples_per_step + dp_rank * share
    return list(range(first, first + share))
