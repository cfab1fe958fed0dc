"""Seeded inputs for paged attention, and separate decodes of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftgate.backends.engine.kernels.attention_work import plan_work
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from draftgate.backends.engine.quantisation.fp8_kv import as_cells

WORK: dict[str, dict[str, int]] = {"whole": {"slots": 0}, "cut": {"programs": 60}, "default": {}}
"""Arguments of `plan_work` with which no pair is cut, most pairs are cut, and pairs are cut as
usual."""

SLACK = 256
"""Slots after the blocks, as many as in the engine's pool."""

Parents = Sequence[int]
"""The parent of each draft token in depth-first order, or -1 for the last confirmed token."""


def chain(tokens: int) -> Parents:
    """Return a draft without branches."""
    return range(-1, tokens - 1)


def star(tokens: int) -> Parents:
    """Return a draft of alternatives for the same position."""
    return [-1] * tokens


def comb(tokens: int) -> Parents:
    """Return a chain in which every token has a leaf as a second child."""
    pending = [-1]
    parents: list[int] = []
    for token in range((tokens + 1) // 2):
        parents.append(pending[-1])
        pending.append(token)
    # In depth-first order, the leaves follow from the end of the chain to its beginning.
    parents.extend(pending[-2::-1][: tokens // 2])
    return parents


def bushy(tokens: int, seed: int) -> Parents:
    """Return a random tree with short and long branches."""
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []
    path = [-1]
    for token in range(tokens):
        kept = int(torch.randint(len(path), (1,), generator=generator))
        path = path[: len(path) - kept // 2]
        parents.append(path[-1])
        path.append(token)
    return parents


def ancestors_of(parents: Parents) -> list[int]:
    """Return the ancestor mask of each draft token as an int64."""
    masks: list[int] = []
    for token, parent in enumerate(parents):
        masks.append(1 << token | (masks[parent] if parent >= 0 else 0))
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of paged attention on the CPU, with NaN in unused cache slots."""

    query: torch.Tensor
    layer_kv: torch.Tensor
    cu_query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    trees: DraftTrees | None = None

    def arguments(self, device: str = "cpu") -> tuple[Any, ...]:
        """Return the positional arguments on a device."""
        fields = (self.query, self.layer_kv, self.cu_query_lens, self.context_lens)
        tables = BlockTables.of_rows(self.block_tables.to(device))
        return *(field.to(device) for field in fields), tables

    def keywords(self, device: str = "cpu") -> dict[str, Any]:
        """Return the keyword arguments that kernel and reference share, without the window."""
        trees = self.trees and DraftTrees(*(field.to(device) for field in self.trees))
        scale = float(self.query.shape[2]) ** -0.5
        return {"block_size": self.block_size, "scale": scale, "trees": trees}

    def attend(
        self,
        work: str = "default",
        *,
        device: str = "cpu",
        window: int | None = None,
        softcap: float | None = None,
        split_size: int = 512,
    ) -> torch.Tensor:
        """Return the output of the kernel with a work list of a kind of `WORK`."""
        keywords = {**self.keywords(device), "window": window, "split_size": split_size}
        scale = keywords.pop("scale")
        arguments = self.arguments(device)
        listed = plan_work(*arguments, **keywords, **WORK[work])
        return paged_attention(*arguments, **keywords, scale=scale, softcap=softcap, work=listed)

    def rows(self) -> list[tuple[int, int]]:
        """Return (sequence, index of the query token) of each row."""
        lens = self.cu_query_lens.diff().tolist()
        return [
            (sequence, index) for sequence, length in enumerate(lens) for index in range(length)
        ]

    def decode_of(self, sequence: int, index: int) -> AttentionCase:
        """Return the batch that decodes only query token ``index`` of a sequence.

        The draft tokens on its path have consecutive slots, as after their acceptance.
        """
        begin, end = self.cu_query_lens[sequence : sequence + 2].tolist()
        token = begin + index
        context = int(self.context_lens[sequence]) - (end - begin) + index + 1
        layer_kv = self.layer_kv
        if self.trees is not None:
            context = int(self.trees.positions[token]) + 1
            layer_kv = self._accepted(sequence, token)
        return replace(
            self,
            query=self.query[token : token + 1],
            layer_kv=layer_kv,
            cu_query_lens=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            block_tables=self.block_tables[sequence : sequence + 1],
            trees=None,
        )

    def _accepted(self, sequence: int, token: int) -> torch.Tensor:
        """Return the cache after the path of a token was accepted."""
        assert self.trees is not None
        start = int(self.trees.draft_starts[sequence])
        mask = int(self.trees.ancestors[token])
        path = [bit for bit in range(64) if mask >> bit & 1]
        table = self.block_tables[sequence]
        moved = self.layer_kv.clone()
        source = slots_of(table, start + torch.tensor(path, dtype=torch.int64), self.block_size)
        target = slots_of(table, start + torch.arange(len(path)), self.block_size)
        as_cells(moved)[:, target] = as_cells(self.layer_kv)[:, source]
        return moved


def slots_of(table: torch.Tensor, tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slots of a sequence's tokens."""
    return table[tokens // block_size].to(torch.int64) * block_size + tokens % block_size


def attention_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    drafts: Sequence[Parents] | None = None,
    padding: int = 0,
    seed: int = 0,
) -> AttentionCase:
    """Return a ragged batch whose sequences have shuffled blocks.

    Args:
      query_lens: query tokens of each sequence, including drafts.
      context_lens: tokens of each sequence in the cache, including drafts.
      drafts: the tree of each sequence, or None for a case without trees.
      padding: tokens that belong to no sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for context in context_lens]
    total = sum(blocks_of) + 3
    shuffled = torch.randperm(total, generator=generator)
    tables = torch.full((len(context_lens), max(blocks_of)), -1, dtype=torch.int32)
    shape = (2 * kv_heads, total * block_size + SLACK, head_dim)
    layer_kv = torch.full(shape, torch.nan, dtype=dtype)
    used = 0
    for sequence, (context, count) in enumerate(zip(context_lens, blocks_of, strict=True)):
        tables[sequence, :count] = shuffled[used : used + count].to(torch.int32)
        used += count
        slots = slots_of(tables[sequence], torch.arange(context), block_size)
        data = torch.randn((2 * kv_heads, context, head_dim), generator=generator)
        layer_kv[:, slots] = data.to(dtype)
    query = torch.randn((sum(query_lens) + padding, query_heads, head_dim), generator=generator).to(
        dtype
    )
    return AttentionCase(
        query,
        layer_kv,
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        block_size,
        None if drafts is None else _trees(query_lens, context_lens, drafts, padding),
    )


def _trees(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    drafts: Sequence[Parents],
    padding: int,
) -> DraftTrees:
    """Return the draft tokens that each row attends to, for drafts at the ends of the sequences."""
    ancestors: list[int] = []
    starts: list[int] = []
    positions: list[int] = []
    for query_len, context, parents in zip(query_lens, context_lens, drafts, strict=True):
        masks = ancestors_of(parents)
        start = context - len(masks)
        starts.append(start)
        ancestors.extend([0] * (query_len - len(masks)) + masks)
        positions.extend(range(context - query_len, start))
        positions.extend(start + (mask % (1 << 64)).bit_count() - 1 for mask in masks)
    ancestors.extend([0] * padding)
    positions.extend([0] * padding)
    return DraftTrees(
        torch.tensor(ancestors, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )
