"""RMS normalisation in Triton, alone and with the residual sum. ``rms_norm_ref`` is the definition.

A program holds one row in registers, and reads and writes each element once.

Bits of a row. The hidden size and the number of warps, both constants of the model, determine the
order of its sum. This holds as long as rows begin at multiples of 16 bytes, because another
alignment changes the layout of registers. The compiler contracts nothing
(``enable_fp_fusion=False``). A row therefore has the same bits with a fused and with an earlier
sum.

Bytes per row: ``rms_norm`` 2 * hidden * element size, ``add_rms_norm`` twice that number. The
weight is in the cache. 64 rows of 4096 in bfloat16 are 1.0 and 2.1 MB, which take at least 0.22 and
0.44 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_LAUNCH_OPTIONS: Final[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of the compiler, a part of the numerics class."""


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the normed row, or the normed sum and the sum. The grid is (rows).

    ``residual_ptr`` is None for the norm alone. Otherwise the residual receives the sum.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    cells = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    x = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        summed = (residual + x).to(residual_ptr.dtype.element_ty)
        # Several warps read a short row, so no warp may write before all have read.
        tl.debug_barrier()
        tl.store(residual_ptr + cells, summed, mask=inside)
        x = summed.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=0), HIDDEN * 1.0)
    normed = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight
    tl.store(out_ptr + cells, normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm rows as ``rms_norm_ref.rms_norm`` does, without a device synchronisation.

    Args:
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous. hidden is any size.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.

    Returns:
      ``[rows, hidden]`` in the dtype of x.

    Raises:
      ValueError: a tensor has another shape, dtype or layout.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and norm rows as ``rms_norm_ref.add_rms_norm`` does, without a device synchronisation.

    Args:
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous. hidden is any size.
      residual: shape and dtype of x, contiguous, receives the sum.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.

    Returns:
      ``rms_norm(residual + x)``, ``[rows, hidden]`` in the dtype of x.

    Raises:
      ValueError: a tensor has another shape, dtype or layout.
    """
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, hidden = x.shape
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError("x and residual need the same shape and dtype")
    if weight.shape != (hidden,):
        raise ValueError(f"rms_norm needs a weight of ({hidden},), not {tuple(weight.shape)}")
    if not all(t is None or t.is_contiguous() for t in (x, residual, weight)):
        raise ValueError("rms_norm needs contiguous rows and weight")
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(rows,)](
            out, x, residual, weight, eps, HIDDEN=hidden, BLOCK=block, **_LAUNCH_OPTIONS
        )
    return out
