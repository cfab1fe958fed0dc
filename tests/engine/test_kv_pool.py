"""The KV memory that the target and a draft model share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.draft_pages import DraftPages, DraftTable
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool, num_blocks_for

TARGET = read_model_config(SHIPPED_MODEL)


def draft_config(layers: int = 2, kv_heads: int = 2, head_dim: int = 32) -> ModelConfig:
    return replace(TARGET, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [8, 16, 32])
def test_draft_pages_and_target_blocks_do_not_overlap(head_dim: int) -> None:
    """After writes to all pages and blocks, every page and block contains its own numbers."""
    draft = draft_config(head_dim=head_dim)
    pool = KvPool(TARGET, 12, torch.float32)
    view = pool.draft_layers(draft)
    blocks = KvBlocks(12, BLOCK_TOKENS)
    pages = DraftPages(blocks, view.groups, view.page_tokens, view.group_pages)
    table, drafts = [], [DraftTable() for _ in range(3)]
    blocks.extend(table, 7 * BLOCK_TOKENS)
    for index, draft_table in enumerate(drafts):
        pages.extend(draft_table, (index + 1) * 5 * view.page_tokens)

    def places():
        for block in table:
            for layer in pool.layers:
                yield 1 + block, layer[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        for page in (page for each in drafts for page in each.pages):
            slots = slice(page * view.page_tokens, (page + 1) * view.page_tokens)
            for layer in view.layers:
                yield 1000 + page, layer[:, slots]

    for number, part in places():
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in places())
    assert sum(len(each.pages) for each in drafts) == 30


def test_block_holds_as_many_draft_pages_as_fit() -> None:
    """The draft pages in a block use all bytes of the block."""
    view = KvPool(TARGET, 4, torch.float32).draft_layers(draft_config())
    per_page = draft_config().kv_bytes_per_token(4) * view.page_tokens
    per_block = TARGET.kv_bytes_per_token(4) * BLOCK_TOKENS
    assert view.groups * per_page == per_block


@pytest.mark.parametrize(
    "draft",
    [draft_config(layers=7, kv_heads=8), draft_config(head_dim=64), draft_config(head_dim=24)],
)
def test_draft_model_that_does_not_fit_is_rejected(draft: ModelConfig) -> None:
    """The loader rejects a draft model that is larger than its target or has heads across
    blocks."""
    with pytest.raises(ValueError, match=r"draft model.* does not fit"):
        KvPool(TARGET, 4, torch.float32).draft_layers(draft)


def test_pool_takes_memory_only_when_used() -> None:
    """The unused part of a large pool takes address space but no memory."""
    before = resident_pages()
    num_blocks = num_blocks_for(TARGET, 2 << 30, torch.float32)
    pool = KvPool(TARGET, num_blocks, torch.float32)
    pool.layers[0][:, :BLOCK_TOKENS] = 1.0
    strips, pages_of_block = len(pool.memory), -(-pool.block_bytes // len(pool.memory) // 4096)
    assert resident_pages() - before < strips * (pages_of_block + 1) + 256
    assert not pool.layers[-1][:, -1].any()


def test_released_blocks_take_no_memory() -> None:
    """The memory of released blocks returns to the system, and other blocks keep their content."""
    pool = KvPool(TARGET, 256, torch.float32)
    before = resident_pages()
    pool.memory.fill_(1.0)
    assert (resident_pages() - before) * 4096 > 0.9 * pool.memory.nbytes
    pool.release([range(16), range(20, 250)])
    assert (resident_pages() - before) * 4096 < 0.1 * pool.memory.nbytes
    slots = torch.arange(pool.memory.shape[1]) // BLOCK_TOKENS
    kept = ((slots >= 16) & (slots < 20)) | (slots >= 250)
    assert (pool.memory[:, kept] == 1.0).all()


def test_block_beside_a_used_block_of_its_page_keeps_its_memory() -> None:
    """A release changes nothing outside of its runs, even if blocks are smaller than a page."""
    small = draft_config(head_dim=16)  # 1 KiB in each strip
    pool = KvPool(small, 64, torch.float32)
    pool.memory.fill_(1.0)
    pool.release([range(1, 2), range(5, 30)])
    slots = torch.arange(pool.memory.shape[1]) // BLOCK_TOKENS
    assert (pool.memory[:, (slots < 5) | (slots >= 30)] == 1.0).all()
    assert not pool.memory[:, (slots >= 8) & (slots < 28)].any()


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
