"""Paged attention in the interpreter, in float32: its bfloat16 products are wrong."""

from __future__ import annotations

import pytest
import torch

from backends.engine.kernels import paged_attention_ref
from backends.engine.kernels.paged_attention import paged_attention
from tests.kernels import cases

# Triton 3.6 interprets loop bounds in a way that NumPy 2.3 deprecates (and 2.4 refuses).
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

# A chunk, a decode, a verification, an empty (padding) sequence, a verification that starts in one
# split and ends in the next, the first token of a sequence, and a whole prompt.
_QUERY_LENS = [20, 1, 5, 0, 4, 1, 18]
_CONTEXT_LENS = [40, 100, 70, 3, 66, 1, 18]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"),
    [(4, 4, 16), (6, 2, 32), (8, 2, 64), (7, 1, 80)],
)
def test_ragged_batch_equals_the_reference(
    query_heads: int, kv_heads: int, head_dim: int, parallel: bool
) -> None:
    """A mixed batch gets the reference's values, for odd head sizes and groups."""
    case = cases.attention_case(
        _QUERY_LENS, _CONTEXT_LENS, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim
    )
    out = paged_attention(
        *case.arguments(), scale=case.scale, split_size=64, parallel_splits=parallel
    )
    expected = paged_attention_ref.paged_attention(*case.arguments(), scale=case.scale)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


def test_splits_in_parallel_and_in_a_loop_give_the_same_bits() -> None:
    """Whether splits run in parallel is a matter of speed alone."""
    case = cases.attention_case(
        _QUERY_LENS, _CONTEXT_LENS, query_heads=6, kv_heads=2, head_dim=32, seed=1
    )
    results = [
        paged_attention(*case.arguments(), scale=case.scale, split_size=64, parallel_splits=mode)
        for mode in (False, True)
    ]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("parallel", [False, True])
def test_verified_rows_equal_decodes_bit_for_bit(parallel: bool) -> None:
    """Each row of chunks and verifications has the bits of its token decoded alone."""
    case = cases.attention_case(
        [6, 5, 3], [67, 21, 130], query_heads=6, kv_heads=2, head_dim=32, seed=2
    )
    together = paged_attention(
        *case.arguments(), scale=case.scale, split_size=64, parallel_splits=parallel
    )
    token = 0
    for sequence, query_len in enumerate([6, 5, 3]):
        for index in range(query_len):
            alone = case.decode_of(sequence, index)
            one = paged_attention(*alone.arguments(), scale=case.scale, split_size=64)
            assert torch.equal(one[0], together[token]), (sequence, index)
            token += 1


def test_context_bound_may_be_given() -> None:
    """A bound on the context changes the grid and not the result."""
    case = cases.attention_case([1, 2], [40, 70], query_heads=4, kv_heads=4, head_dim=16)
    bounded = paged_attention(*case.arguments(), scale=case.scale, split_size=64, max_context=70)
    free = paged_attention(*case.arguments(), scale=case.scale, split_size=64)
    assert torch.equal(bounded, free)


def test_unsupported_layouts_are_refused() -> None:
    """Layouts that the kernel would read wrongly raise instead."""
    case = cases.attention_case([1], [4], query_heads=3, kv_heads=3, head_dim=16)
    query, keys, values, *rest = case.arguments()
    with pytest.raises(ValueError, match="query heads"):
        paged_attention(query, keys[:, :, :2], values[:, :, :2], *rest, scale=1.0)
    with pytest.raises(ValueError, match="unit stride"):
        paged_attention(query[..., ::2], keys, values, *rest, scale=1.0)
    with pytest.raises(ValueError, match="multiple"):
        paged_attention(query, keys, values, *rest, scale=1.0, split_size=100)
