"""Rotation, head norms and the write to the KV memory in torch.

For a row at position p and a head x of the queries and keys, (a, b) are the halves of the rotated
dimensions of x, which are all or the first ones:

    x       <- x * weight / sqrt(mean(x^2) + eps)                 only with qk_norm (Qwen3)
    (a, b)  <- (a * cos[p] - b * sin[p], b * cos[p] + a * sin[p])
    x       <- x * query_scale                                    queries only, head_dim^-1/2

The function writes keys and unchanged values to the row's slot of the KV memory. All arithmetic is
in float32, rounded once to the dtype of the fused product, or of the KV memory if that is FP8
(`quantisation/fp8_kv.py`). The decoder's CPU path in bfloat16
rounds after every operation instead. In float32 without qk_norm, the bits are those of that path.

Source: Su et al., "RoFormer" (arXiv 2104.09864).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.rms_norm_ref import rms_norm
from draftgate.backends.engine.quantisation.fp8_kv import as_cells, stored


def rope_kv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer_kv: Tensor,
    *,
    qk_norm: Tensor | None,
    eps: float,
    query_scale: float | None = None,
) -> Tensor:
    """Write keys and values to their slots and return the queries.

    Args:
      qkv: ``[rows, (heads + 2 * kv_heads) * head_dim]``, queries, then keys, then values.
      positions: int64 ``[rows]``.
      slots: int64 ``[rows]``. If rows share a slot (padding), the last writer is arbitrary.
      cos: ``[max_positions, rotated / 2]``, for the first ``rotated`` dimensions of a head.
      sin: ``[max_positions, rotated / 2]``.
      layer_kv: ``[2 * kv_heads, slots, head_dim]``, keys first, in the dtype of qkv or in E4M3,
        modified in place.
      qk_norm: ``[heads + kv_heads, head_dim]``, or None for models without head norms.
      eps: added to the mean square of a head.
      query_scale: factor on the queries. None means ``head_dim ** -0.5``.

    Returns:
      Scaled queries ``[rows, heads, head_dim]`` in the dtype of qkv.
    """
    strips, _, head_dim = layer_kv.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - strips
    num_rotated = num_heads + strips // 2
    rotated = heads[:, :num_rotated].to(torch.float32)
    if qk_norm is not None:
        rotated = rms_norm(rotated, qk_norm, eps)
    rotated = _rotate(rotated, cos[positions].to(torch.float32), sin[positions].to(torch.float32))
    kv = torch.cat([rotated[:, num_heads:], heads[:, num_rotated:].to(torch.float32)], dim=1)
    as_cells(layer_kv).index_copy_(1, slots, stored(kv, layer_kv.dtype).transpose(0, 1))
    scale = head_dim**-0.5 if query_scale is None else query_scale
    queries: Tensor = rotated[:, :num_heads] * scale
    return queries.to(qkv.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [rows, heads, head_dim] by angles [rows, rotated / 2]."""
    half = cos.shape[-1]
    a, b, others = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, others], dim=-1)
