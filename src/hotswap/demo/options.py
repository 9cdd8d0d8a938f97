"""Options that all training programs share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hotswap.demo.samples import BatchShape
from hotswap.errors import UsageError

_AXIS = re.compile(r"(tp|pp|dp)([1-9]\d*)")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes: tensor, pipeline and data parallel."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Of a text like ``tp2,pp2,dp2``. UsageError for anything else."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = _AXIS.fullmatch(part.strip())
            if match is None or match[1] in sizes:
                raise UsageError(f"layout {text!r}: write it like tp2,pp2,dp2, each axis at most once")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @property
    def slots(self) -> int:
        """Workers of the whole job."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        """The text that parses to this layout, without axes of size one."""
        named = [f"{axis}{size}" for axis, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1]
        return ",".join(named) or "dp1"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """``out``: where evidence goes, none if empty. ``eval_every``: steps between evaluation losses, 0 for none.

    ``load_s``: seconds that the data of a step takes to come, for jobs that have to last although there is little to compute.
    ``virtual_stages``: model chunks of each Megatron-Core pipeline stage, interleaved if there are several. ``compile``: the blocks
    of an FSDP2 model. What a program doesn't have it ignores.
    """

    layout: Layout = Layout()
    steps: int = 20
    seed: int = 1234
    out: str = ""
    eval_every: int = 5
    lr: float = 3e-3
    warmup: int = 5
    microbatches: int = 1
    rows: int = 4
    tokens: int = 64
    layers: int = 4
    width: int = 96
    dropout: float = 0.1
    bf16: bool = False
    overlap: bool = False
    sequence_parallel: bool = False
    virtual_stages: int = 1
    load_s: float = 0.0
    compile: bool = False

    def batch(self, dp_size: int, full_dp_size: int | None = None) -> BatchShape:
        """How samples are cut for *dp_size* data-parallel ranks; where there are fewer than *full_dp_size*, each does more."""
        times = 1 if full_dp_size is None else full_dp_size // dp_size
        return BatchShape(dp_size=dp_size, microbatches=self.microbatches * times, rows=self.rows, tokens=self.tokens)

    def evaluates(self, step: int) -> bool:
        """Whether *step* begins with an evaluation."""
        return self.eval_every > 0 and step % self.eval_every == 0

    def lr_scale(self, step: int) -> float:
        """Learning rate of *step* relative to its maximum: linear warm-up, then half a cosine down to a tenth."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def to_arguments(self) -> list[str]:
        """Command line that parses back to these options."""
        arguments: list[str] = []
        for item in fields(self):
            value = getattr(self, item.name)
            flag = "--" + item.name.replace("_", "-")
            if isinstance(value, bool):
                arguments += [flag] if value else []
            else:
                arguments += [flag, str(value)]
        return arguments


def parse_train_options(argv: Sequence[str] | None = None, **defaults: object) -> TrainOptions:
    """Options of a training program's command line; *defaults* are the program's own."""
    base = TrainOptions(**defaults)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for item in fields(TrainOptions):
        default = getattr(base, item.name)
        flag = "--" + item.name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=default)
        else:
            parser.add_argument(
                flag, type=Layout.parse if isinstance(default, Layout) else type(default), default=default
            )
    return TrainOptions(**vars(parser.parse_args(argv)))
