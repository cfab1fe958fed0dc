"""Ragged paged attention in torch: prefill chunks, decodes and multi-token verification alike.

For query token i of a sequence with q query tokens of c tokens in context, at position
p = c - q + i, and for query head h reading key-value head h // group:

    out[i, h] = sum_j softmax_j(scale * <query[i, h], key[j]>) * value[j],      j = 0 .. p

Key j of sequence s is row ``j % block_size`` of block ``block_tables[s, j // block_size]``.
"""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a ragged batch over a paged cache; computes in float32.

    Args:
      query: ``[tokens, query_heads, head_dim]``, sequences back to back.
      key_cache: ``[blocks, block_size, kv_heads, head_dim]``, this step's keys already written.
      value_cache: same shape as ``key_cache``.
      cu_query_lens: int32 ``[sequences + 1]``, query tokens of sequence s are
        ``cu_query_lens[s] .. cu_query_lens[s + 1]``; a sequence may have none.
      context_lens: int32 ``[sequences]``, tokens in the cache including this step's.
      block_tables: int32 ``[sequences, max_blocks]``; entries past the context are not read.
      scale: factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
      ``[tokens, query_heads, head_dim]`` in the dtype of ``query``; tokens that belong to no
      sequence get zeros.
    """
    out = torch.zeros_like(query)
    bounds = cu_query_lens.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        begin, end = bounds[sequence], bounds[sequence + 1]
        if begin == end:
            continue
        keys = _gather(key_cache, block_tables[sequence], context)
        values = _gather(value_cache, block_tables[sequence], context)
        out[begin:end] = _attend(query[begin:end], keys, values, scale).to(query.dtype)
    return out


def _gather(cache: torch.Tensor, blocks: torch.Tensor, context: int) -> torch.Tensor:
    """Returns the first ``context`` tokens of a sequence: float32 [kv_heads, context, head_dim]."""
    block_size = cache.shape[1]
    used = blocks[: -(-context // block_size)].to(torch.int64)
    return cache[used].flatten(0, 1)[:context].transpose(0, 1).to(torch.float32)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of the last tokens of one sequence: float32 [tokens, query_heads, head_dim]."""
    tokens, query_heads, _ = query.shape
    context = keys.shape[1]
    group = query_heads // keys.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = query.transpose(0, 1).to(torch.float32) @ keys.transpose(1, 2) * scale
    position = torch.arange(context - tokens, context, device=query.device)
    hidden = torch.arange(context, device=query.device) > position[:, None]
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
