"""From fused queries, keys and values to what attention reads, in torch.

Per row at position p, for each head x of the queries and keys, the halves of x being (a, b):

    x       <- x * weight / sqrt(mean(x^2) + eps)                 only with qk_norm (Qwen3)
    (a, b)  <- (a * cos[p] - b * sin[p], b * cos[p] + a * sin[p])
    x       <- x * head_dim^-1/2                                  queries only

Keys and values go to the row's slot of the KV memory, values as they are. Everything is computed in
float32 and rounded once, to the dtype of the fused product; the decoder's CPU path in bfloat16
rounds after every operation instead. In float32 without qk_norm the bits are those of that path.

Source: Su et al., "RoFormer" (arXiv 2104.09864).
"""

from __future__ import annotations

import torch

from draftgate.backends.engine.kernels.rms_norm_ref import rms_norm


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    qk_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Writes keys and values to their slots and returns the queries.

    Args:
      qkv: ``[rows, (heads + 2 * kv_heads) * head_dim]``, queries, then keys, then values.
      positions: int64 ``[rows]``.
      slots: int64 ``[rows]``; of rows that share a slot (padding) any may prevail.
      cos: ``[max_positions, head_dim / 2]``.
      sin: like cos.
      layer_kv: ``[2 * kv_heads, slots, head_dim]``, keys first; modified.
      qk_norm: ``[heads + kv_heads, head_dim]``, or None for models that do not normalise heads.
      eps: added to the mean square of a head.

    Returns:
      Queries ``[rows, heads, head_dim]`` in the dtype of qkv, scaled by ``head_dim ** -0.5``.
    """
    strips, _, head_dim = layer_kv.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - strips
    rotated = num_heads + strips // 2
    turned = heads[:, :rotated].to(torch.float32)
    if qk_norm is not None:
        turned = rms_norm(turned, qk_norm, eps)
    turned = _rotate(turned, cos[positions].to(torch.float32), sin[positions].to(torch.float32))
    keys = turned[:, num_heads:].to(qkv.dtype)
    layer_kv.index_copy_(1, slots, torch.cat([keys, heads[:, rotated:]], dim=1).transpose(0, 1))
    queries: torch.Tensor = turned[:, :num_heads] * head_dim**-0.5
    return queries.to(qkv.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of x [rows, heads, head_dim] by angles [rows, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
