"""RMS normalisation of rows in torch, alone and with the residual sum before it.

    rms_norm(x)[i] = x[i] * weight[i] / sqrt(mean(x^2) + eps)

Everything is computed in float32 and rounded once, to the dtype of x. The residual sum is rounded
to that dtype before it is normed, so that fusing it changes no bit.

Source: Zhang, Sennrich, "Root mean square layer normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the normed rows.

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


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(rms_norm(residual + x), residual + x)``.

    Args:
      x: ``[rows, hidden]``, what a block adds to the residual stream.
      residual: ``[rows, hidden]``, the stream before it.
      weight: ``[hidden]``.
      eps: added to the mean square.

    Returns:
      Both ``[rows, hidden]`` in the dtype of x.
    """
    summed = residual + x
    return rms_norm(summed, weight, eps), summed
