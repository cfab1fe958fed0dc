"""The gated activations of a feed-forward block in torch.

    swiglu(gate, up) = silu(gate) * up,      silu(x) = x / (1 + exp(-x))
    geglu(gate, up)  = gelu(gate) * up,      gelu(x) = x / 2 (1 + tanh(u)),
                                             u = sqrt(2 / pi) (x + 0.044715 x^3)

All arithmetic is in float32, rounded once to the dtype of the input. The decoder's CPU path in
bfloat16 also rounds the activation.

Source: Shazeer, "GLU variants improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    Args:
      gate_up: ``[rows, 2 * intermediate]``, the gate values of a row, then its up values.

    Returns:
      ``[rows, intermediate]`` in the dtype of gate_up.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, with the approximation of GELU by tanh.

    Args:
      gate_up: ``[rows, 2 * intermediate]``, the gate values of a row, then its up values.

    Returns:
      ``[rows, intermediate]`` in the dtype of gate_up.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
