"""Sampling in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import sample_verify, sample_verify_ref
from tests.kernels import sampling_cases as cases


@pytest.mark.parametrize(
    ("vocab", "tile"),
    [
        pytest.param(4096, 2048, marks=pytest.mark.long),
        (1001, 256),
        (7, 16),
        pytest.param(511, 512, marks=pytest.mark.long),
    ],
)
def test_tokens_equal_the_reference(vocab: int, tile: int) -> None:
    """The kernel samples the same tokens as the reference with mixed filters, ties and any
    tiling."""
    rows = cases.mixed_row_sampling(14, seed=vocab)
    logits = cases.random_logits(14, vocab, seed=vocab)
    expected = sample_verify_ref.sample(logits, rows)
    assert sample_verify.sample(logits, rows, tile=tile).tolist() == expected.tolist()


@pytest.mark.parametrize("top_k", [1, 2, 9, 16])
def test_top_k_of_equal_logits_keeps_the_lowest_ids(top_k: int) -> None:
    """The filter top-k keeps the first k ids of equal logits."""
    rows = cases.row_sampling(6, top_k=top_k, seed=5)
    logits = torch.zeros((6, 37))
    tokens = sample_verify.sample(logits, rows, tile=16)
    assert tokens.tolist() == sample_verify_ref.sample(logits, rows).tolist()
    assert int(tokens.max()) < top_k


def test_top_k_one_is_greedy() -> None:
    """top_k = 1 gives the greedy token even at a high temperature and with ties."""
    logits = cases.random_logits(5, 300, seed=1)
    rows = cases.row_sampling(5, top_k=1, temperature=5.0)
    assert sample_verify.sample(logits, rows, tile=64).tolist() == logits.argmax(dim=1).tolist()


def test_strided_rows_are_read_in_place() -> None:
    """The kernel reads logits that are a slice of a wider matrix."""
    wide = cases.random_logits(4, 200, seed=2)
    rows = cases.mixed_row_sampling(4, seed=2)
    narrow = wide[:, :150]
    expected = sample_verify_ref.sample(narrow.contiguous(), rows)
    assert sample_verify.sample(narrow, rows, tile=64).tolist() == expected.tolist()


def test_logits_of_16_bits_give_the_tokens_of_float32() -> None:
    """Logits in bfloat16, which often tie, give the tokens of the same logits in float32."""
    logits = cases.random_logits(14, 700, seed=6).bfloat16()
    rows = cases.mixed_row_sampling(14, seed=6)
    expected = sample_verify_ref.sample(logits, rows)
    assert sample_verify.sample(logits, rows, tile=256).tolist() == expected.tolist()
    assert sample_verify_ref.sample(logits.float(), rows).tolist() == expected.tolist()
