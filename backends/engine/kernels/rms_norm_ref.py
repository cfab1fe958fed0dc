"""RMS normalisation of rows in torch, alone and with the residual sum before it.

    rms_norm(x)[i] = x[i] * weight[i] / sqrt(mean(x^2) + eps)

All arithmetic is in float32, rounded once to the dtype of x. The residual sum is also rounded to
that dtype before the norm, so fusion changes no bit.

Source: Zhang, Sennrich, "Root mean square layer normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normed rows.

    Args:
      x: ``[..., hidden]``.
      weight: ``[hidden]``, or any shape that broadcasts against x.
      eps: added to the mean square.

    Returns:
      Shape and dtype of x.
    """
    wide = x.to(torch.float32)
    mean = wide.square().mean(dim=-1, keepdim=True)
    normed = wide * (1.0 / (mean + eps).sqrt()) * weight.to(torch.float32)
    return normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual and return the normed sum.

    Args:
      x: ``[rows, hidden]``, the output of a block.
      residual: ``[rows, hidden]``, the residual stream, which receives the sum.
      weight: ``[hidden]``.
      eps: added to the mean square.

    Returns:
      ``rms_norm(residual + x)``, ``[rows, hidden]`` in the dtype of x.
    """
    residual += x
    return rms_norm(residual, weight, eps)
