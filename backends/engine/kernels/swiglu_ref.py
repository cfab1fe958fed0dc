"""The gated activation of a feed-forward block in torch.

    swiglu(gate, up) = silu(gate) * up,      silu(x) = x / (1 + exp(-x))

Computed in float32 and rounded once, to the dtype of the input; the decoder's CPU path in bfloat16
rounds silu(gate) too.

Source: Shazeer, "GLU variants improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch.nn import functional


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns ``silu(gate) * up``.

    Args:
      gate_up: ``[rows, 2 * intermediate]``, the gates of a row, then its ups.

    Returns:
      ``[rows, intermediate]`` in the dtype of gate_up.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
