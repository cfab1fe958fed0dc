"""Ragged paged attention in torch: prefill chunks, decodes, and verification of chains and trees.

A row is a query token at position p of its sequence. It sees the keys of positions max(0, p -
window + 1) .. p on its own path. Query head h reads key-value head h // group:

    out[row, h] = sum_j softmax_j(scale * <query[row, h], key[j]>) * value[j]

With a soft cap c, the scores s become c * tanh(s / c) before the softmax (Gemma 2, arXiv
2408.00118).

A layer of the cache is ``[2 * kv_heads, slots, head_dim]``, keys first, in the dtype of the queries
or in E4M3. The slot of token j of a
sequence with block table t is ``t[j // block_size] * block_size + j % block_size``. Without trees,
query token i of q with c tokens in the cache has position c - q + i, and so has its key.

With trees, the tokens from ``draft_starts[s]`` on are a draft tree, depth first. Draft token i has
position draft_starts[s] + depth - 1, and a row sees the token if bit i of its ancestor mask is set.
Tree attention is from SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.quantisation.fp8_kv import as_cells, read


class BlockTables(NamedTuple):
    """The block tables of all sequences, one after the other, in any order.

    Attributes:
      blocks: int32 ``[any size]``, contiguous.
      starts: int32 ``[sequences]``, contiguous, the place of each table in ``blocks``. The number
        of its entries follows from the context.
      longest: upper bound on the entries of a table.
    """

    blocks: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of_rows(cls, rows: Tensor) -> BlockTables:
        """Return tables of equal length, int32 ``[sequences, length]``."""
        sequences, length = rows.shape
        starts = torch.arange(sequences, dtype=torch.int32, device=rows.device) * length
        return cls(rows.flatten(), starts, length)


class DraftTrees(NamedTuple):
    """The draft tokens that each row of a step sees.

    The query tokens of a sequence are confirmed tokens, then at most 64 draft tokens, depth first.

    Attributes:
      ancestors: int64 ``[tokens]``. Bit i is set if draft token i of the sequence is the row's
        token or its ancestor. Confirmed tokens have 0.
      draft_starts: int32 ``[sequences]``, confirmed tokens in the cache, including this step's.
      positions: int32 or int64 ``[tokens]``, position of each row on its path.
    """

    ancestors: Tensor
    draft_starts: Tensor
    positions: Tensor


def paged_attention(
    query: Tensor,
    layer_kv: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    block_tables: BlockTables,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    trees: DraftTrees | None = None,
) -> Tensor:
    """Attend a ragged batch over a paged cache in float32.

    Args:
      query: ``[tokens, query_heads, head_dim]``, the rows of all sequences in order.
      layer_kv: ``[2 * kv_heads, slots, head_dim]``, which includes this step's keys and values.
      cu_query_lens: int32 ``[sequences + 1]``. Sequence s has query tokens
        ``cu_query_lens[s] .. cu_query_lens[s + 1]``, possibly none.
      context_lens: int32 ``[sequences]``, tokens in the cache including all of this step's.
      block_tables: entries beyond a context have no effect.
      block_size: slots of a block.
      scale: factor on the scores, usually ``head_dim ** -0.5``, positive.
      window: positions that a row sees, including its own, or None for all.
      softcap: bound on the scores, positive, or None.
      trees: the draft tokens that each row sees, or None if no draft branches.

    Returns:
      ``[tokens, query_heads, head_dim]`` in the dtype of ``query``. Tokens that belong to no
      sequence get zeros.
    """
    out = torch.zeros_like(query)
    bounds = cu_query_lens.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        begin, end = bounds[sequence], bounds[sequence + 1]
        if begin == end:
            continue
        blocks = block_tables.blocks[int(block_tables.starts[sequence]) :]
        keys, values = _gather(layer_kv, blocks, context, block_size).chunk(2)
        if trees is None:
            positions, key_positions = _chain(end - begin, context, query.device)
        else:
            positions, key_positions = _tree(trees, sequence, slice(begin, end), context)
        visible = key_positions <= positions
        if window is not None:
            visible &= key_positions > positions - window
        rows = _attend(query[begin:end], keys, values, visible, scale, softcap)
        out[begin:end] = rows.to(query.dtype)
    return out


def _gather(layer_kv: Tensor, blocks: Tensor, context: int, block_size: int) -> Tensor:
    """Return a sequence's keys and values: float32 [2 * kv_heads, context, head_dim]."""
    token = torch.arange(context, device=layer_kv.device)
    slots = blocks[token // block_size].to(torch.int64) * block_size + token % block_size
    return read(as_cells(layer_kv)[:, slots].view(layer_kv.dtype), torch.float32)


def _chain(tokens: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of rows [tokens, 1] and keys [1, context]."""
    key_positions = torch.arange(context, device=device)[None, :]
    return key_positions[:, context - tokens :].T, key_positions


def _tree(trees: DraftTrees, sequence: int, rows: slice, context: int) -> tuple[Tensor, Tensor]:
    """Return the positions of rows [tokens, 1] and of keys as each row sees them [tokens, context].

    Keys off the path of a row get a position beyond all others.
    """
    ancestors = trees.ancestors[rows, None]
    start = int(trees.draft_starts[sequence])
    on_path = ancestors >> torch.arange(context - start, device=ancestors.device) & 1
    draft = torch.where(on_path == 1, start + on_path.cumsum(1) - 1, context)
    confirmed = torch.arange(start, device=ancestors.device).expand(len(ancestors), -1)
    return trees.positions[rows, None], torch.cat([confirmed, draft], dim=1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend the rows of a sequence: float32 [tokens, query_heads, head_dim]."""
    group = query.shape[1] // keys.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = query.transpose(0, 1).to(torch.float32) @ keys.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill_(~visible, -torch.inf).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
