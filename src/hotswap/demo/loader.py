"""A loader whose position is its whole state: after a swap every sample is still consumed exactly once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hotswap.demo import corpus
from hotswap.demo.samples import BatchShape, planned_ids
from hotswap.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """``tokens`` and ``labels``: int64, [rows, tokens]; labels are the tokens that follow."""

    tokens: torch.Tensor
    labels: torch.Tensor


class ExactlyOnceLoader:
    """Microbatches of one data-parallel rank, in a seeded order that every rank derives by itself.

    A sample's id counts on from epoch to epoch, so that each id is planned for exactly one step of one rank.
    """

    def __init__(
        self,
        shape: BatchShape,
        *,
        dp_rank: int,
        seed: int,
        device: torch.device | str = "cpu",
        load_s: float = 0.0,
    ) -> None:
        """*device* is where the microbatches go, *load_s* how many seconds those of a step take to come.

        UsageError if the text is too short for one global batch.
        """
        self._device = device
        self._load_s = load_s
        self.shape = shape
        self.dp_rank = dp_rank
        self.seed = seed
        self.position = 0
        text = corpus.load()
        self._train = _samples(text.train, shape.tokens)
        self._held_out = _samples(text.held_out, shape.tokens)
        self._orders: dict[int, torch.Tensor] = {}
        if len(self._train) < shape.samples_per_step:
            raise UsageError(
                f"the text has {len(self._train)} samples, a step needs {shape.samples_per_step}: use shorter samples"
            )

    def next_step(self) -> tuple[list[Microbatch], list[int]]:
        """This rank's microbatches for the next step and the ids of their samples."""
        time.sleep(self._load_s)
        ids = planned_ids(self.shape, self.position, self.dp_rank)
        self.position += 1
        rows = self._train[torch.tensor([self._index(sample) for sample in ids])].long()
        return self._microbatches(rows), ids

    def held_out(self) -> list[Microbatch]:
        """Microbatches for the evaluation loss, always the same."""
        needed = self.shape.samples_per_step // self.shape.dp_size
        first = self.dp_rank * needed
        rows = torch.arange(first, first + needed) % len(self._held_out)
        return self._microbatches(self._held_out[rows].long())

    def state_dict(self) -> dict[str, int]:
        """The number of steps given out."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go back, or on, to that step."""
        self.position = state["position"]

    def _microbatches(self, rows: torch.Tensor) -> list[Microbatch]:
        return [_microbatch(part) for part in torch.split(rows.to(self._device), self.shape.rows)]

    def _index(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self._train))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders[epoch] = torch.randperm(len(self._train), generator=generator)
        return int(self._orders[epoch][place])


def _samples(text: bytes, tokens: int) -> torch.Tensor:
    """[samples, tokens + 1]: neighbours share one byte, the last label of one is the first token of the next."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data.unfold(0, tokens + 1, tokens)


def _microbatch(rows: torch.Tensor) -> Microbatch:
    return Microbatch(tokens=rows[:, :-1].contiguous(), labels=rows[:, 1:].contiguous())
