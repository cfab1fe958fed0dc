"""Products of rows and weights in FP8 (E4M3) in torch.

    out[r, o] = sum over g of s[r, g] * t[o, g] * (sum over i in g of codes[r, i] * w[o, i]) + b[o]

A group g has `group` inputs, s are the scales of the rows, and t those of the weight. Sums are in
float32, rounded once. ``quantisation.e4m3.fp8_rows`` defines the rounding of rows to FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftgate.backends.engine.quantisation.e4m3 import scaled


def fp8_product(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    group: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product, ``[rows, outputs]``.

    Args:
      codes: E4M3 ``[rows, inputs]``.
      row_scales: float32 ``[rows, groups]``.
      weight: E4M3 ``[outputs, inputs]``.
      scales: float32 ``[outputs, groups]``.
      group: inputs of a group.
      bias: float32 ``[outputs]``, or None.
      dtype: dtype of the result.
    """
    product = scaled(codes, row_scales, group) @ scaled(weight, scales, group).T
    return (product if bias is None else product + bias).to(dtype)
