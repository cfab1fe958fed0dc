"""Numbers of 4 bits, two in each byte with the first in the lower bits.

    weight[o, i] = t[o, i // group] * (w[o, i] - z[o, i // group])

w are the numbers, z the zeros and t the scales of their groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(packed: Tensor) -> Tensor:
    """Return the 4-bit numbers of bytes, lower bits first: uint8 `[..., 2 * width]`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Return two 4-bit numbers per byte, the inverse of `unpack`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantised(packed: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Return the float32 weights `[outputs, width]`.

    Args:
      packed: uint8 `[outputs, width / 2]`.
      scales: `[outputs, groups]` of any floating-point dtype.
      zeros: uint8 `[outputs, groups]`.
      group: columns that share a scale and a zero.
    """
    codes, scales, zeros = unpack(packed).float(), scales.float(), zeros.float()
    if scales.shape[1] > 1:
        width = codes.shape[1]
        scales, zeros = (t.repeat_interleave(group, 1)[:, :width] for t in (scales, zeros))
    return (codes - zeros) * scales
