"""Equal bytes have equal numbers wherever they lie, any changed bit shows, and looking changes nothing."""

from __future__ import annotations

import pytest
import torch

from hotswap.replication.fingerprint import ROW_WORDS, ROWS_AT_ONCE, Numbers, combine, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
LONG = ROW_WORDS * (ROWS_AT_ONCE + 1) + 77
"""Words: more rows than are done at once, and a rest."""


def filled(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = numel * torch.empty((), dtype=dtype).element_size()
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def number(tensor: torch.Tensor) -> int:
    return int(fingerprint(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 64, 1001])
def test_any_flipped_bit_shows(dtype: torch.dtype, numel: int) -> None:
    tensor = filled(numel, dtype)
    before = number(tensor)
    raw = tensor.view(torch.uint8)
    for at in {0, len(raw) // 2, len(raw) - 1}:
        for bit in range(1 if dtype is torch.bool else 8):
            raw[at] ^= 1 << bit
            assert number(tensor) != before, (at, bit)
            raw[at] ^= 1 << bit
    assert number(tensor) == before


def test_a_long_tensor_is_looked_at_to_its_end() -> None:
    tensor = filled(LONG, torch.int32)
    before = number(tensor)
    for at in (0, ROW_WORDS, ROW_WORDS * ROWS_AT_ONCE - 1, ROW_WORDS * ROWS_AT_ONCE, LONG - 78, LONG - 1):
        tensor[at] ^= 1 << 30
        assert number(tensor) != before, at
        tensor[at] ^= 1 << 30
    # Two flips of the same bit, signs included, must not undo each other.
    tensor[[5, ROW_WORDS + 5]] ^= -(1 << 31)
    assert number(tensor) != before


def test_order_counts() -> None:
    tensor = filled(1000, torch.float32)
    assert number(tensor.flip(0)) != number(tensor)
    numbers = torch.arange(1, ROW_WORDS + 3, dtype=torch.int64)
    assert int(combine(numbers.flip(0))) != int(combine(numbers))


def test_only_the_bytes_count_and_not_how_they_lie() -> None:
    tensor = filled(60, torch.float32).view(6, 10)
    wanted = number(tensor)
    assert number(tensor.t().contiguous().t()) == wanted, "other strides"
    assert number(torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:]) == wanted
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)])[1:]
    assert number(odd) == wanted, "at an odd address"
    assert number(tensor.view(-1)[:0]) == 0 == number(torch.empty(0, dtype=torch.bool))


def test_nothing_is_changed_by_looking() -> None:
    tensor = filled(5000, torch.float32).requires_grad_()
    before, state, version = tensor.detach().clone(), torch.get_rng_state(), tensor._version
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = number(tensor)
    torch.set_default_dtype(torch.float64)
    try:
        assert number(tensor) == found
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensor._version == version
    assert torch.equal(before.view(torch.uint8), tensor.detach().view(torch.uint8))


def test_numbers_are_read_in_their_order() -> None:
    tensors = [filled(10, torch.float32, seed) for seed in range(3)]
    assert Numbers([fingerprint(t) for t in tensors]).read() == [number(t) for t in tensors]
    assert Numbers([]).read() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_finds_the_same_number() -> None:
    tensors = [filled(LONG, torch.int32), filled(77, torch.bfloat16), filled(3, torch.uint8)]
    wanted = [number(t) for t in tensors]
    assert Numbers([fingerprint(t.cuda()) for t in tensors]).read() == wanted
    mixed = Numbers([fingerprint(tensors[0].cuda()), fingerprint(tensors[1]), fingerprint(tensors[2].cuda())])
    assert mixed.read() == wanted
