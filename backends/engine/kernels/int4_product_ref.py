"""Products of rows with weights of 4 bits in torch.

    out[r, o] = sum over g of t[o, g] * (sum over i in g of x[r, i] * (w[o, i] - z[o, g])) + b[o]

A group g has `group` inputs, t are the scales of the weight, and z its zeros. Sums are in float32,
rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftgate.backends.engine.quantisation.nibbles import dequantised


def int4_product(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product, ``[rows, outputs]``.

    Args:
      x: ``[rows, inputs]`` of any floating-point dtype.
      packed: uint8 ``[outputs, inputs / 2]``, the even inputs in the lower bits.
      scales: ``[outputs, groups]`` of any floating-point dtype.
      zeros: uint8 ``[outputs, groups]``.
      group: inputs of a group.
      bias: float32 ``[outputs]``, or None.
      dtype: dtype of the result.
    """
    product = x.float() @ dequantised(packed, scales, zeros, group).T
    return (product if bias is None else product + bias).to(dtype)
