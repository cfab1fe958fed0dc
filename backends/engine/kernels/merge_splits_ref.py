"""Merge of the softmaxes of key splits in torch.

Split s of a row has the largest score m_s, in base 2, and the sum of weights l_s = sum_j 2^(x_j -
m_s). Its weighted values are a_s = sum_j 2^(x_j - m_s) * value[j]. With m = max_s m_s, the row is

    out = sum_s 2^(m_s - m) * a_s / sum_s 2^(m_s - m) * l_s,

over the splits of its token, which are in consecutive slots. A split without visible keys has m_s =
-inf and zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_splits(out: Tensor, weighted: Tensor, stats: Tensor, partials: Tensor) -> Tensor:
    """Merge the splits of every row that has any.

    Args:
      out: ``[tokens, query_heads, head_dim]``. The function does not write other rows.
      weighted: float32 ``[slots, query_heads, head_dim]``, a_s.
      stats: float32 ``[slots, query_heads, 2]``, (m_s, l_s).
      partials: int32 ``[tokens, 2]``, the first slot of each token and its number of splits, as in
        ``attention_work_ref.AttentionWork``.

    Returns:
      ``out``.
    """
    for token, (first, splits) in enumerate(partials.tolist()):
        if splits:
            slots = slice(first, first + splits)
            largest, total = stats[slots].unbind(-1)
            factor = torch.exp2(largest - largest.amax(0))
            merged = (weighted[slots] * factor[..., None]).sum(0)
            out[token] = (merged / (total * factor).sum(0)[:, None]).to(out.dtype)
    return out
