"""The token masks of grammars in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import token_mask, token_mask_ref
from tests.kernels.sampling_cases import random_masks


@pytest.mark.parametrize(("vocab", "words"), [(7, 1), (1000, 32), (2050, 64), (4099, 129)])
def test_masked_logits_equal_the_reference(vocab: int, words: int) -> None:
    """Masks that end before, at and beyond the vocabulary change only their rows."""
    logits, rows = torch.randn(5, vocab), torch.tensor([4, 0, 2])
    masks = random_masks(3, words, seed=vocab)
    found, expected = logits.clone(), logits.clone()
    token_mask.forbid_tokens(found, rows, masks)
    token_mask_ref.forbid_tokens(expected, rows, masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[[1, 3]], logits[[1, 3]])
    assert (found != logits).any(dim=1)[rows].all()


def test_empty_list_of_masks_launches_nothing() -> None:
    """Steps without grammars leave the logits unchanged."""
    logits = torch.randn(2, 40)
    before = logits.clone()
    token_mask.forbid_tokens(logits, torch.empty(0, dtype=torch.int64), random_masks(0, 2, seed=0))
    assert torch.equal(logits, before)


def test_strided_logits_are_refused() -> None:
    """The kernel needs contiguous rows."""
    with pytest.raises(ValueError, match="contiguous"):
        token_mask.forbid_tokens(
            torch.randn(40, 3).T, torch.tensor([0]), random_masks(1, 2, seed=1)
        )
