"""The reference of token masks, compared with a loop over bits."""

from __future__ import annotations

import math

import pytest
import torch

from draftgate.backends.engine.kernels import token_mask_ref
from tests.kernels.sampling_cases import random_masks


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (33, 2), (64, 2), (100, 2)])
def test_tokens_without_a_bit_are_forbidden(vocab: int, words: int) -> None:
    """The lowest bit of the first word stands for token 0, and tokens beyond the mask have none."""
    logits, masks = torch.randn(3, vocab), random_masks(2, words, seed=vocab)
    found = logits.clone()
    token_mask_ref.forbid_tokens(found, torch.tensor([2, 0]), masks)
    for row, mask in zip((2, 0), masks.tolist(), strict=True):
        for token in range(vocab):
            allowed = token < 32 * words and mask[token // 32] >> (token % 32) & 1
            expected = logits[row, token].item() if allowed else -math.inf
            assert found[row, token].item() == expected
    assert torch.equal(found[1], logits[1])
