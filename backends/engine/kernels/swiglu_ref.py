"""The gated activation of a feed-forward block in torch.

    swiglu(gate, up) = silu(gate) * up,      silu(x) = x / (1 + exp(-x))

All arithmetic is in float32, rounded once to the dtype of the input. The decoder's CPU path in
bfloat16 also rounds silu(gate).

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
