"""Rotation, head norms and the write to the KV memory in one kernel.

``rope_kv_ref`` is the definition.

A program owns up to ``_MOST_HEADS`` neighbouring heads of one row. The fused product holds queries,
keys and values in the order of the KV memory's strips, so the index of a head determines its
target. Each head is in two halves, which makes the rotation elementwise. If only the first
dimensions of a head rotate, each half holds a half of them and then a half of the others.

Bits of a row. The kernel computes each head separately. The head dimension and the number of warps,
both constants of the model, determine the order of the sum in its norm. Rows must begin at
multiples of 16 bytes (see ``rms_norm``). The compiler contracts nothing
(``enable_fp_fusion=False``), so without head norms the bits are those of the reference.

Bytes per row: 2 * (heads + 2 * kv_heads) * head_dim * element size, and a row of each table. 64
rows of an 8B Llama (32 + 2 * 8 heads of 128) in bfloat16 are 1.6 MB, which take at least 0.33 us at
4.8 TB/s.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.fp8_product import e4m3
from draftgate.backends.engine.quantisation.fp8_kv import FP8, as_cells

_LAUNCH_OPTIONS: Final[dict[str, Any]] = {"num_warps": 2, "enable_fp_fusion": False, "maxnreg": 64}
"""Options of the compiler, a part of the numerics class.

The limit of 64 registers prevents ptxas from spilling.
"""

# A thread holds 16 bytes of bfloat16 per half.
_HALVES: Final = 512
_MOST_HEADS: Final = 8


@triton.jit
def _head_norm(a, b, weight_ptr, cells, others, mask, eps, HALF: tl.constexpr):
    """Return the normed halves of heads: float32 [HEADS, HALF_PAD] each, zero beyond HALF."""
    mean = tl.div_rn(tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1), HALF * 2.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    weight_a = tl.load(weight_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptr + others, mask=mask, other=0.0).to(tl.float32)
    return a * inverse * weight_a, b * inverse * weight_b


@triton.jit
def _rope_kv_kernel(
    query_ptr,
    layer_kv_ptr,
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    qk_norm_ptr,
    eps,
    query_scale,
    strip_stride,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write queries, keys and values of HEADS heads. With FP8, the KV memory is uint8.

    The grid is (rows, groups of HEADS heads).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF_PAD)[None, :]
    inside = dims < HALF
    # The pairs (i, i + TURNED) rotate. The others are (i + TURNED, i + HALF), beyond 2 * TURNED.
    first, second = dims, dims + HALF
    if TURNED < HALF:
        first, second = tl.where(dims < TURNED, dims, dims + TURNED), dims + HALF
        second = tl.where(dims < TURNED, dims + TURNED, second)
    cells, others = head * (2 * HALF) + first, head * (2 * HALF) + second
    mask = (head < NUM_HEADS + 2 * KV_HEADS) & inside
    row_ptr = qkv_ptr + row * ((NUM_HEADS + 2 * KV_HEADS) * 2 * HALF)
    a = tl.load(row_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + others, mask=mask, other=0.0).to(tl.float32)

    turns = (head < NUM_HEADS + KV_HEADS) & inside
    normed_a, normed_b = a, b
    if qk_norm_ptr is not None:
        normed_a, normed_b = _head_norm(a, b, qk_norm_ptr, cells, others, turns, eps, HALF)
    angle = tl.load(positions_ptr + row) * TURNED + dims
    cos = tl.load(cos_ptr + angle, mask=dims < TURNED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=dims < TURNED, other=0.0).to(tl.float32)
    a = tl.where(turns, normed_a * cos - normed_b * sin, a)
    b = tl.where(turns, normed_b * cos + normed_a * sin, b)

    is_query = (head < NUM_HEADS) & inside
    query_row_ptr = query_ptr + row * (NUM_HEADS * 2 * HALF)
    tl.store(query_row_ptr + cells, a * query_scale, mask=is_query)
    tl.store(query_row_ptr + others, b * query_scale, mask=is_query)
    is_kv = (head >= NUM_HEADS) & mask
    slot = tl.load(slots_ptr + row)
    kv_cells = (head - NUM_HEADS).to(tl.int64) * strip_stride + slot * (2 * HALF)
    tl.store(layer_kv_ptr + kv_cells + first, e4m3(a) if FP8 else a, mask=is_kv)
    tl.store(layer_kv_ptr + kv_cells + second, e4m3(b) if FP8 else b, mask=is_kv)


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
    """Rotate and store as ``rope_kv_ref.rope_kv`` does, without a device synchronisation.

    Args:
      qkv: float32, float16 or bfloat16 ``[rows, (heads + 2 * kv_heads) * head_dim]``, contiguous.
      positions: int64 ``[rows]``, contiguous, below max_positions.
      slots: int64 ``[rows]``, contiguous. If rows share a slot (padding), the last writer is
        arbitrary.
      cos: ``[max_positions, rotated / 2]``, contiguous, for the first ``rotated`` dimensions of a
        head.
      sin: ``[max_positions, rotated / 2]``, contiguous.
      layer_kv: ``[2 * kv_heads, slots, head_dim]`` in the dtype of qkv or in E4M3, each strip
        contiguous, modified in place.
      qk_norm: ``[heads + kv_heads, head_dim]``, contiguous, or None.
      eps: added to the mean square of a head.
      query_scale: factor on the queries. None means ``head_dim ** -0.5``.

    Returns:
      Scaled queries ``[rows, heads, head_dim]`` in the dtype of qkv.

    Raises:
      ValueError: the kernel does not support a shape, dtype or layout.
    """
    _check(qkv, positions, slots, cos, sin, layer_kv, qk_norm)
    strips, _, head_dim = layer_kv.shape
    rows, total_heads = qkv.shape[0], qkv.shape[1] // head_dim
    num_heads = total_heads - strips
    query = torch.empty((rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half_pad = triton.next_power_of_2(head_dim // 2)
    heads = max(1, min(_HALVES // half_pad, _MOST_HEADS))
    if rows:
        _rope_kv_kernel[(rows, triton.cdiv(total_heads, heads))](
            query,
            as_cells(layer_kv),
            qkv,
            positions,
            slots,
            cos,
            sin,
            qk_norm,
            eps,
            head_dim**-0.5 if query_scale is None else query_scale,
            layer_kv.stride(0),
            NUM_HEADS=num_heads,
            KV_HEADS=strips // 2,
            HALF=head_dim // 2,
            TURNED=cos.shape[1],
            HALF_PAD=half_pad,
            HEADS=heads,
            FP8=layer_kv.dtype is FP8,
            **_LAUNCH_OPTIONS,
        )
    return query


def _check(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer_kv: Tensor,
    qk_norm: Tensor | None,
) -> None:
    strips, _, head_dim = layer_kv.shape
    total_heads, rest = divmod(qkv.shape[1], head_dim)
    if rest or head_dim % 2 or strips % 2 or total_heads <= strips:
        raise ValueError(
            f"rows of {qkv.shape[1]} do not fit {strips} strips of heads of {head_dim}"
        )
    if layer_kv.stride()[1:] != (head_dim, 1) or layer_kv.dtype not in {qkv.dtype, FP8}:
        raise ValueError(
            "rope_kv needs contiguous strips of the KV memory in the dtype of qkv or in FP8"
        )
    if not 1 <= cos.shape[1] <= head_dim // 2 or sin.shape != cos.shape:
        raise ValueError("cos and sin need at most head_dim / 2 columns")
    if qk_norm is not None and qk_norm.shape != (total_heads - strips // 2, head_dim):
        raise ValueError("qk_norm needs a row for each query and key head")
    inputs = [qkv, positions, slots, cos, sin, *([] if qk_norm is None else [qk_norm])]
    if not all(tensor.is_contiguous() for tensor in inputs):
        raise ValueError("rope_kv needs contiguous inputs")
