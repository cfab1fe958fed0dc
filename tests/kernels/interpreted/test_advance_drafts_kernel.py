"""The input of the next pass of a draft model, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import advance_drafts, advance_drafts_ref
from tests.kernels.draft_rows import draft_case


@pytest.mark.parametrize("sequences", [1, 64, 65, 130])
def test_advanced_rows_equal_the_reference(sequences: int) -> None:
    """Sequences with drafts left, complete sequences and rows of padding are as in the reference,
    in three passes and for more rows than sequences."""
    found, expected = draft_case(sequences), draft_case(sequences)
    for seed in range(3):
        tokens = torch.randint(900, (sequences + 5,), generator=torch.Generator().manual_seed(seed))
        advance_drafts.advance_drafts(tokens, *found.arguments(), **found.sizes)
        advance_drafts_ref.advance_drafts(tokens, *expected.arguments(), **expected.sizes)
        for one, other in zip(found.tensors(), expected.tensors(), strict=True):
            assert torch.equal(one, other)
