"""Sizes that change while a worker serves compile no further variant of a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels.expert_routes import group
from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from draftgate.backends.engine.kernels.token_mask import forbid_tokens
from tests.kernels.compiling import meta_tensor, variants_of

_SIZES = (1, 2, 15, 16, 32, 48)
"""Triton specialises integers that are 1 or multiples of 16."""


def _attend(sequences: int, pages: int) -> None:
    index, tokens = torch.int32, 4 * sequences
    paged_attention(
        meta_tensor(tokens, 32, 128, dtype=torch.bfloat16),
        meta_tensor(16, 1 << 20, 128, dtype=torch.bfloat16),
        meta_tensor(sequences + 1, dtype=index),
        meta_tensor(sequences, dtype=index),
        BlockTables(meta_tensor(8, dtype=index), meta_tensor(sequences, dtype=index), pages),
        block_size=16,
        scale=1.0,
        trees=DraftTrees(
            meta_tensor(tokens, dtype=torch.int64),
            meta_tensor(sequences, dtype=index),
            meta_tensor(tokens, dtype=index),
        ),
    )


def test_attention_has_one_variant_for_any_number_of_sequences() -> None:
    """Neither the work list nor attention nor the merge depends on the number of sequences."""
    variants = variants_of(lambda size: _attend(size, 512), _SIZES)
    assert variants == {"_work_kernel": 1, "_attention_kernel": 1, "_merge_kernel": 1}


def test_attention_has_one_variant_for_any_length_of_contexts() -> None:
    """Neither the work list nor attention nor the merge depends on the longest context."""
    variants = variants_of(lambda size: _attend(8, 32 * size + size % 3), _SIZES)
    assert variants == {"_work_kernel": 1, "_attention_kernel": 1, "_merge_kernel": 1}


def test_moves_have_one_variant_for_any_length_of_drafts() -> None:
    """The moves of a tree with a longer walk need no other kernel."""

    def move(depth: int) -> None:
        places = meta_tensor(8, depth, dtype=torch.int64)
        kv_move(meta_tensor(512, 1 << 20, 128, dtype=torch.bfloat16), places, places)

    assert variants_of(move, (*_SIZES, 65, 128)) == {"_kv_move_kernel": 1}


def test_groups_of_experts_have_one_variant_for_any_number_of_rows() -> None:
    """The rows of a step do not select another kernel."""

    def rows(count: int) -> None:
        group(meta_tensor(count, 8, dtype=torch.int32), 128, 64)

    assert variants_of(rows, _SIZES)["_group_kernel"] == 1


def test_token_masks_have_one_variant_for_any_number_of_rows() -> None:
    """The number of sequences with a grammar does not select another kernel."""

    def mask(count: int) -> None:
        rows = meta_tensor(count, dtype=torch.int64)
        masks = meta_tensor(count, 4748, dtype=torch.int32)
        forbid_tokens(meta_tensor(64, 151_936), rows, masks)

    assert variants_of(mask, _SIZES) == {"_token_mask_kernel": 1}
