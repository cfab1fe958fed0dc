"""Matrix products with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from draftgate.backends.engine.linear import Product, float32_product


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

    padded: Final = True
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
    def padded(self) -> bool:
        """Whether a part needs the rows of `padded_rows`."""
        return any(part.padded for part in self._parts)

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
