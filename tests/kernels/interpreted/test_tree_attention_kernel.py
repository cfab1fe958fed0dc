"""Attention to branching drafts in the interpreter, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftgate.backends.engine.kernels import paged_attention_ref
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import DraftTrees
from tests.examples import grid
from tests.kernels.attention_cases import (
    AttentionCase,
    attention_case,
    bushy,
    chain,
    comb,
    star,
)


def _mixed() -> AttentionCase:
    """Return trees of all kinds among a chunk, a decode and padding.

    The comb's paths end one split after the draft's start. The star starts at a split boundary. The
    tree of 64 tokens fills several programs.
    """
    return attention_case(
        [9, 7, 66, 0, 1, 6, 4, 12],
        [70, 71, 150, 3, 100, 40, 40, 139],
        query_heads=3,
        kv_heads=1,
        head_dim=16,
        drafts=[comb(8), star(7), bushy(64, 1), [], [], [], chain(3), bushy(11, 2)],
        seed=1,
    )


@pytest.mark.parametrize("window", grid((None, 2, 30), quick={30}.__contains__))
def test_trees_equal_the_reference(window: int | None) -> None:
    """Attention to combs, stars, chains and bushes equals the reference, whole and cut."""
    case = _mixed()
    expected = paged_attention_ref.paged_attention(
        *case.arguments(), **case.keywords(), window=window
    )
    whole, cut = (case.attend(work, window=window, split_size=64) for work in ("whole", "cut"))
    torch.testing.assert_close(whole, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("work", ["whole", "cut"])
def test_row_of_a_branch_has_the_bits_of_its_path(work: str, window: int | None, fp8: bool) -> None:
    """A row of any branch has the same bits as a decode of its token after its ancestors."""
    case = attention_case(
        [6, 3, 9],
        [67, 66, 70],
        query_heads=2,
        kv_heads=1,
        head_dim=16,
        drafts=[comb(5), star(3), bushy(8, 3)],
        seed=2,
    )
    if fp8:
        case = replace(case, layer_kv=case.layer_kv.to(torch.float8_e4m3fn))
    together = case.attend(work, window=window, split_size=64)
    for token, (sequence, index) in enumerate(case.rows()):
        alone = case.decode_of(sequence, index).attend(work, window=window, split_size=64)
        assert torch.equal(alone[0], together[token]), (sequence, index)


def test_the_last_of_64_draft_tokens_has_the_bits_of_its_path() -> None:
    """The mask of the last of 64 draft tokens uses bit 63, the sign of an int64, as an ancestor
    bit."""
    drafts = [chain(64), comb(64)]
    case = attention_case(
        [64, 65], [80, 90], query_heads=4, kv_heads=2, head_dim=16, drafts=drafts, seed=3
    )
    together = case.attend("whole", split_size=64)
    for sequence, index in ((0, 63), (1, 64), (1, 33), (1, 32)):
        token = int(case.cu_query_lens[sequence]) + index
        alone = case.decode_of(sequence, index).attend("whole", split_size=64)
        assert torch.equal(alone[0], together[token]), (sequence, index)


@pytest.mark.parametrize("work", ["whole", "cut"])
def test_chain_has_the_same_bits_with_and_without_masks(work: str) -> None:
    """The trees of other sequences do not change a sequence without branches."""
    lens, contexts = [6, 20, 1, 5], [67, 70, 128, 5]
    drafts = [chain(5), [], [], chain(5)]
    sizes = {"query_heads": 2, "kv_heads": 1, "head_dim": 16, "seed": 4}
    plain = attention_case(lens, contexts, **sizes).attend(work, split_size=64)
    masked = attention_case(lens, contexts, **sizes, drafts=drafts).attend(work, split_size=64)
    assert torch.equal(plain, masked)


def test_malformed_trees_are_rejected() -> None:
    """The kernel raises ValueError for masks of another width and for fields that end early."""
    case = _mixed()
    assert case.trees is not None
    ancestors, starts, positions = case.trees
    for trees, message in (
        (DraftTrees(ancestors.int(), starts, positions), "int64"),
        (DraftTrees(ancestors[:-1], starts, positions), "fewer than"),
        (DraftTrees(ancestors, starts, positions[:-1]), "fewer than"),
        (DraftTrees(ancestors.repeat(2)[::2], starts, positions), "unit stride"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(*case.arguments(), block_size=16, scale=1.0, trees=trees)
