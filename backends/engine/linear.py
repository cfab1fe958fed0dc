"""Matrix products whose rows do not depend on how many rows there are.

Bits of a row must be equal whether it is computed alone, in a verify step or in a prefill chunk.
On a CPU in float32 that holds with prepacked weights (oneDNN) and the number of rows padded to a
multiple of 16: measured equal at 1 to 512 rows on Zen 4 and on Sapphire Rapids, 1 and 2 threads
(2026-11); the worker checks it again at start (`warmup.rows_are_exact`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

ROW_TILE: Final = 16
"""Rows of every product are padded to a multiple of this."""


def padded_rows(rows: int) -> int:
    """Return the rows of a step of that many tokens, padding included."""
    return -(-rows // ROW_TILE) * ROW_TILE


# Private operators of torch: the public ones pack the weight anew in every call.
_pack: Final[Any] = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_packed_linear: Final[Any] = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


class Linear:
    """`x @ weight.T` with the weight prepacked where the device has a layout for it."""

    def __init__(self, weight: Tensor) -> None:
        """Pack a weight of shape [out_features, in_features]. The argument may be freed."""
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self._packed:
            weight = _pack(weight.contiguous(), ROW_TILE)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features], rows a multiple of 16."""
        if self._packed:
            product: Tensor = _packed_linear(x, self._weight, None, "none", [], "")
            return product
        return torch.nn.functional.linear(x, self._weight)
