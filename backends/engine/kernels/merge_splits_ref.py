"""Merge of the softmaxes of key splits in torch.

Split s of a row has the largest score m_s, in base 2, and the sum of weights l_s = sum_j 2^(x_j -
m_s). Its weighted values are a_s = sum_j 2^(x_j - m_s) * value[j]. With m = max_s m_s, the row is

    out = sum_s 2^(m_s - m) * a_s / sum_s 2^(m_s - m) * l_s,

s = max(0, p - window + 1) // split_size .. p // split_size for a row at position p. The merge does
not read other splits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_splits(
    out: Tensor,
    weighted: Tensor,
    stats: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    positions: Tensor | None = None,
    *,
    window: int | None = None,
    split_size: int,
) -> Tensor:
    """Merge the splits of every row that belongs to a sequence.

    Args:
      out: ``[tokens, query_heads, head_dim]``. The function does not write other rows.
      weighted: float32 ``[tokens, query_heads, num_splits, head_dim]``, a_s.
      stats: float32 ``[tokens, query_heads, num_splits, 2]``, (m_s, l_s).
      cu_query_lens: int32 ``[sequences + 1]``.
      context_lens: int32 ``[sequences]``, tokens in the cache including this step's.
      positions: int32 or int64 ``[tokens]``, or None if rows are consecutive up to the context's
        end.
      window: positions that a row sees, including its own, or None for all.
      split_size: keys per split.

    Returns:
      ``out``.
    """
    bounds = cu_query_lens.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        end = bounds[sequence + 1]
        for token in range(bounds[sequence], end):
            position = context - end + token if positions is None else int(positions[token])
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = slice(oldest // split_size, position // split_size + 1)
            largest, total = stats[token, :, seen].unbind(-1)
            factor = torch.exp2(largest - largest.amax(1, keepdim=True))
            merged = (weighted[token, :, seen] * factor[..., None]).sum(1)
            out[token] = (merged / (total * factor).sum(1)[:, None]).to(out.dtype)
    return out
