from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.demo import corpus
from hotswap.demo.loader import ExactlyOnceLoader
from hotswap.demo.samples import BatchShape, planned_ids
from hotswap.errors import UsageError

SHAPE = BatchShape(dp_size=2, microbatches=3, rows=2, tokens=16)
shapes = st.builds(
    BatchShape, dp_size=st.integers(1, 5), microbatches=st.integers(1, 4), rows=st.integers(1, 4), tokens=st.just(16)
)


@given(shape=shapes, steps=st.integers(0, 8))
def test_every_id_is_planned_for_one_step_of_one_rank(shape: BatchShape, steps: int) -> None:
    ids = [i for step in range(steps) for rank in range(shape.dp_size) for i in planned_ids(shape, step, rank)]
    assert sorted(ids) == list(range(steps * shape.samples_per_step))


def test_a_rank_gets_its_share_in_microbatches() -> None:
    batches, ids = ExactlyOnceLoader(SHAPE, dp_rank=1, seed=7).next_step()
    assert ids == [6, 7, 8, 9, 10, 11]
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 16)] * 3
    assert all(batch.tokens.dtype == batch.labels.dtype == torch.int64 for batch in batches)


def test_data_may_take_a_while() -> None:
    slow, fast = ExactlyOnceLoader(SHAPE, dp_rank=1, seed=7, load_s=0.05), ExactlyOnceLoader(SHAPE, dp_rank=1, seed=7)
    began = time.monotonic()
    assert slow.next_step()[1] == fast.next_step()[1]
    assert time.monotonic() - began >= 0.05


def test_labels_are_the_tokens_that_follow() -> None:
    batches, _ = ExactlyOnceLoader(SHAPE, dp_rank=0, seed=7).next_step()
    for batch in batches:
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])


def test_tokens_are_the_text() -> None:
    batches, _ = ExactlyOnceLoader(SHAPE, dp_rank=0, seed=7).next_step()
    for row in batches[0].tokens:
        assert bytes(row.tolist()) in corpus.load().train


@settings(max_examples=20, deadline=None)
@given(position=st.integers(0, 50), ahead=st.integers(0, 5))
def test_a_loaded_position_gives_the_same_batches_again(position: int, ahead: int) -> None:
    loader = ExactlyOnceLoader(SHAPE, dp_rank=1, seed=7)
    loader.load_state_dict({"position": position})
    state = loader.state_dict()
    expected = loader.next_step()
    for _ in range(ahead):
        loader.next_step()
    loader.load_state_dict(state)
    found = loader.next_step()
    assert found[1] == expected[1]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(found[0], expected[0], strict=True))


def test_the_seed_decides_the_order() -> None:
    first, same, other = (ExactlyOnceLoader(SHAPE, dp_rank=0, seed=seed).next_step()[0][0].tokens for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_an_epoch_shows_every_sample_once_and_the_next_in_another_order() -> None:
    loader = ExactlyOnceLoader(BatchShape(dp_size=1, microbatches=1, rows=1, tokens=16384), dp_rank=0, seed=3)
    count = len(loader._train)
    assert count < 100
    epochs = [[loader.next_step()[0][0].tokens for _ in range(count)] for _ in range(2)]
    seen = [{bytes(batch.flatten().tolist()) for batch in epoch} for epoch in epochs]
    assert len(seen[0]) == count
    assert seen[0] == seen[1]
    assert any(not torch.equal(a, b) for a, b in zip(*epochs, strict=True))


def test_evaluation_sees_held_out_text_and_moves_nothing() -> None:
    loader = ExactlyOnceLoader(SHAPE, dp_rank=1, seed=7)
    first, second = loader.held_out(), loader.held_out()
    assert loader.position == 0
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    assert bytes(first[0].tokens[0].tolist()) in corpus.load().held_out


def test_a_step_larger_than_the_text_is_refused() -> None:
    with pytest.raises(UsageError, match="shorter samples"):
        ExactlyOnceLoader(BatchShape(dp_size=100, microbatches=100, rows=2, tokens=1024), dp_rank=0, seed=1)
