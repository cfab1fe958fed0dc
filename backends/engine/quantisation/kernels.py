"""Matrix products with quantised weights on a GPU."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.fp8_product import fp8_product, fp8_rows
from draftgate.backends.engine.kernels.int4_product import int4_product
from draftgate.backends.engine.quantisation.fp8 import Fp8Weight
from draftgate.backends.engine.quantisation.int4 import Int4Weight


class KernelLinear:
    """`x @ weight.T + bias` in the arithmetic of the weight's format, which stays packed.

    Sums are in float32, rounded once. Nothing returns to the host, so that a graph can capture the
    product.
    """

    padded: Final = True
    library: str | None = None

    def __init__(
        self, weight: Fp8Weight | Int4Weight, bias: Tensor | None = None, *, exact: bool = False
    ) -> None:
        """Take a weight and a bias of [out_features].

        Args:
            weight: a weight on the device.
            bias: [out_features].
            exact: whether the bits of a row must not depend on the number of rows.
        """
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self._exact = exact

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""
        return self._multiply(x, x.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self._weight
        if isinstance(weight, Fp8Weight):
            codes, row_scales = fp8_rows(x, weight.group, weight.input_scale)
            return fp8_product(
                codes,
                row_scales,
                weight.codes,
                weight.scales,
                weight.group,
                self._bias,
                dtype,
                exact=self._exact,
            )
        return int4_product(
            weight.ordered(x),
            weight.packed,
            weight.scales,
            weight.zeros,
            weight.group,
            self._bias,
            dtype,
            exact=self._exact,
        )
