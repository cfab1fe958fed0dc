"""Matrix products with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.fp8_product import fp8_product, fp8_rows
from draftgate.backends.engine.kernels.int4_product import int4_product
from draftgate.backends.engine.linear import Product, float32_product
from draftgate.backends.engine.quantisation.fp8 import Fp8Weight
from draftgate.backends.engine.quantisation.int4 import Int4Weight


class QuantisedWeight(Protocol):
    """A weight that stays packed in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""

    def activations(self, x: Tensor) -> Tensor:
        """Return the float32 activations that the format multiplies."""

    def dense(self, first: int, last: int) -> Tensor:
        """Return the float32 weights of the outputs from `first` to before `last`."""


class QuantisedLinear:
    """`x @ weight.T + bias` in the arithmetic of the weight's format.

    A product widens one tile of the weight after the other to float32, adds in float32, and rounds
    once. Its rows do not depend on each other, as in `Linear`.
    """

    library: str | None = None

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""
        return self.float32(x).to(x.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        weight = self._weight
        product = float32_product(weight.activations(x), self.out_features, weight.dense)
        return product if self._bias is None else product + self._bias


class StackedLinear:
    """Products of the same input side by side, for modules that cannot share one product.

    An example is a fused product of which the checkpoint quantises only some modules.
    """

    def __init__(self, parts: Sequence[Product]) -> None:
        self._parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    @property
    def library(self) -> str | None:
        """The library of a part, or None for torch."""
        return next(filter(None, (part.library for part in self._parts)), None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""
        return torch.cat([part(x) for part in self._parts], 1)

    def float32(self, x: Tensor) -> Tensor:
        """Return the products in float32."""
        return torch.cat([part.float32(x) for part in self._parts], 1)


class KernelLinear:
    """`x @ weight.T + bias` in the arithmetic of the weight's format, which stays packed.

    Sums are in float32, rounded once. Nothing returns to the host, so that a graph can capture the
    product.
    """

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
