"""RMS normalisation in Triton, alone and with the residual sum; defined by ``rms_norm_ref``.

One program holds one row in registers: each element is read and written once.

Bits of a row. The order of its sum follows from the hidden size and the number of warps, constants
of the model, as long as rows begin at multiples of 16 bytes (another alignment is another layout of
registers). Nothing is contracted (``enable_fp_fusion=False``): the fused kernel squares, adds and
scales as the plain one does, and both give the same bits for the same row.

Bytes per row: ``rms_norm`` 2 * hidden * element size, ``add_rms_norm`` twice that; the weight comes
from cache. Floor: these bytes over the memory's bandwidth; 64 rows of 4096 in bfloat16 are 1.0 and
2.1 MB, 0.22 and 0.44 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

LAUNCH_OPTIONS: Final[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}
"""Part of the numerics class."""


@triton.jit
def _normed(x, weight_ptr, columns, eps, HIDDEN: tl.constexpr):
    """Returns the normed row: float32 [BLOCK], of a float32 row with zeros past HIDDEN."""
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=0), HIDDEN * 1.0)
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def _rms_norm_kernel(out_ptr, x_ptr, weight_ptr, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows): writes the normed row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    cells = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    x = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + cells, _normed(x, weight_ptr, columns, eps, HIDDEN), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    out_ptr,
    summed_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows): writes the sum with the residual, and the normed sum."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    cells = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    x = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    summed = (residual + x).to(summed_ptr.dtype.element_ty)
    # The sum may go where the residual lies, and short rows are read by several warps each.
    tl.debug_barrier()
    tl.store(summed_ptr + cells, summed, mask=inside)
    normed = _normed(summed.to(tl.float32), weight_ptr, columns, eps, HIDDEN)
    tl.store(out_ptr + cells, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``rms_norm_ref.rms_norm`` on rows; never synchronises with the device.

    Args:
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous; hidden is any size.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.

    Returns:
      ``[rows, hidden]`` in the dtype of x.
    """
    _check(x, x, weight)
    rows, hidden = x.shape
    out = torch.empty_like(x)
    if rows:
        _rms_norm_kernel[(rows,)](
            out,
            x,
            weight,
            eps,
            HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            **LAUNCH_OPTIONS,
        )
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    summed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``rms_norm_ref.add_rms_norm``; never synchronises with the device.

    Args:
      x: float32, float16 or bfloat16 ``[rows, hidden]``, contiguous; hidden is any size.
      residual: like x; not modified, unless it is to get the sum.
      weight: ``[hidden]``, contiguous.
      eps: added to the mean square.
      summed: like x, gets the sum; may be the residual itself. Allocated otherwise.

    Returns:
      ``(rms_norm(residual + x), residual + x)``, both ``[rows, hidden]`` in the dtype of x.
    """
    _check(x, residual, weight)
    rows, hidden = x.shape
    out = torch.empty_like(x)
    if summed is None:
        summed = torch.empty_like(x)
    _check(summed, residual, weight)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            out,
            summed,
            x,
            residual,
            weight,
            eps,
            HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            **LAUNCH_OPTIONS,
        )
    return out, summed


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError for layouts that the kernels would read wrongly."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError("x and residual need the same shape and dtype")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"a weight of {tuple(weight.shape)} for rows of {x.shape[1]}")
    if not (x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
        raise ValueError("rows and weight need to be contiguous")
