"""A 64-bit number for the bytes of a tensor, computed where the tensor is.

A sum of 32-bit words, each times a 64-bit odd number of its own, modulo 2**64 (multilinear hashing: M. Thorup, "High speed
hashing for integers and strings", section 3). Integer sums do not depend on the order in which a device adds, so equal bytes
give equal numbers on every device. A change of a single word always shows: its difference is less than 2**32 times an odd
number, which is no multiple of 2**64. Several changes hide each other with a probability of about 2**-32.
No random generator is used, and nothing is written to the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW_WORDS = 1 << 18
"""Words that share one table of factors (2 MiB of them)."""
ROWS_AT_ONCE = 64
"""Bounds the memory that is needed meanwhile: 128 MiB of products."""
_WORD_NBYTES = 4
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_factors: dict[torch.device, torch.Tensor] = {}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The number for the bytes of *tensor*, in the order of its elements, as an int64 tensor without dimensions on its device.

    Nothing waits for the device. Shape and dtype do not enter.
    """
    with torch.no_grad():
        words = _words(tensor.detach())
        full = words.numel() // ROW_WORDS
        factors = _factors_on(words.device)
        sums = [
            (words[row * ROW_WORDS : min(row + ROWS_AT_ONCE, full) * ROW_WORDS].view(-1, ROW_WORDS) * factors).sum(1)
            for row in range(0, full, ROWS_AT_ONCE)
        ]
        rest = words[full * ROW_WORDS :]
        sums.append((rest * factors[: rest.numel()]).sum(0, keepdim=True))
        return combine(torch.cat(sums)) if len(sums) > 1 else sums[0][0]


def combine(numbers: torch.Tensor) -> torch.Tensor:
    """One number for several, an int64 tensor of one dimension; their order counts."""
    while numbers.numel() > ROW_WORDS:
        rows = torch.split(numbers, ROW_WORDS)
        numbers = torch.stack([(row * _factors_on(row.device)[: row.numel()]).sum() for row in rows])
    return (numbers * _factors_on(numbers.device)[: numbers.numel()]).sum()


class Numbers:
    """Numbers that may still be under way from a device."""

    def __init__(self, numbers: Sequence[torch.Tensor]) -> None:
        """Nothing waits for the device yet; those on it are copied together, in one copy."""
        self._numbers = list(numbers)
        self._on_device = [index for index, number in enumerate(numbers) if number.is_cuda]
        self._arrived: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if self._on_device:
            together = torch.stack([numbers[index] for index in self._on_device])
            self._arrived = torch.empty(len(together), dtype=torch.int64, device="cpu", pin_memory=True)
            self._arrived.copy_(together, non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()

    def read(self) -> list[int]:
        """All of them; waits until they are there."""
        if self._event is not None and self._arrived is not None:
            self._event.synchronize()
            for index, number in zip(self._on_device, self._arrived, strict=True):
                self._numbers[index] = number
        return [int(number) for number in self._numbers]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as 32-bit words, the last one filled up with zeros. A copy only where they do not lie that way."""
    raw = tensor.reshape(-1).view(torch.uint8)
    missing = -raw.numel() % _WORD_NBYTES
    if missing:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    elif raw.storage_offset() % _WORD_NBYTES or raw.data_ptr() % _WORD_NBYTES:
        raw = raw.clone()
    return raw.view(torch.int32)


def _factors_on(device: torch.device) -> torch.Tensor:
    """The odd factors: the outputs of splitmix64 from zero, with the lowest bit set."""
    found = _factors.get(device)
    if found is None:
        numbers = torch.arange(1, ROW_WORDS + 1, dtype=torch.int64, device="cpu") * _STRIDE
        for shift, factor in zip((30, 27), _MIX, strict=True):
            numbers = (numbers ^ _right(numbers, shift)) * factor
        found = _factors[device] = ((numbers ^ _right(numbers, 31)) | 1).to(device)
    return found


def _right(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift without the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
