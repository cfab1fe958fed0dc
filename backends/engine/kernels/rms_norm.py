"""RMS normalisation in Triton, alone and with the residual sum; defined by ``rms_norm_ref``.

One program holds one row in registers: each element is read and written once.

Bits of a row. The order of its sum follows from the hidden size and the number of warps, constants
of the model, as long as rows begin at multiples of 16 bytes (another alignment is another layout of
registers). Nothing is contracted (``enable_fp_fusion=False``), so a row has the same bits whether
its sum is fused or computed before.

Bytes per row: ``rms_norm`` 2 * hidden * element size, ``add_rms_norm`` twice that; the weight comes
from cache. Floor: these bytes over the memory's bandwidth; 64 rows of 4096 in bfloat16 are 1.0 and
2.1 MB, 0.22 and 0.44 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH_OPTIONS: Final[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}
"""Part of the numerics class."""


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the normed row, or the normed sum and the sum; grid (rows).

    ``residual_ptr`` is None for the norm alone; otherwise the residual receives the sum.
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
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous; hidden is any size.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.

    Returns:
      ``[rows, hidden]`` in the dtype of x.

    Raises:
      ValueError: if a shape, dtype or layout is another.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and norm rows as ``rms_norm_ref.add_rms_norm`` does, without a device synchronisation.

    Args:
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous; hidden is any size.
      residual: shape and dtype of x, contiguous; receives the sum.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.

    Returns:
      ``rms_norm(residual + x)``, ``[rows, hidden]`` in the dtype of x.

    Raises:
      ValueError: if a shape, dtype or layout is another.
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
            out, x, residual, weight, eps, HIDDEN=hidden, BLOCK=block, **LAUNCH_OPTIONS
        )
    return out
