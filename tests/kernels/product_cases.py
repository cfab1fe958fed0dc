"""Seeded inputs for the tests of the products with quantised weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftgate.backends.engine.quantisation.e4m3 import fp8_rows
from tests.kernels.layer_cases import normal


class Shape(NamedTuple):
    """A product of rows with a weight whose groups of inputs share a scale."""

    rows: int
    outputs: int
    inputs: int
    group: int
    biased: bool = False


SHAPES = {
    "one row": Shape(1, 40, 48, 16),
    "few rows, uneven blocks": Shape(16, 33, 136, 40),
    "rows of a verify step": Shape(17, 64, 96, 32, biased=True),
    "many rows": Shape(130, 67, 200, 128),
    "a scale per output": Shape(5, 24, 216, 216),
    "a group of two steps": Shape(3, 40, 320, 160, biased=True),
}
"""Groups of 8 and more inputs, also beyond a step, and shapes that fill no tile."""


class Fp8Case(NamedTuple):
    """Arguments of `fp8_product` in their order."""

    codes: torch.Tensor
    row_scales: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    group: int
    bias: torch.Tensor | None
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> Fp8Case:
        """Return the product of some rows."""
        return self._replace(codes=self.codes[first:last], row_scales=self.row_scales[first:last])


class Int4Case(NamedTuple):
    """Arguments of `int4_product` in their order."""

    x: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    bias: torch.Tensor | None
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> Int4Case:
        """Return the product of some rows."""
        return self._replace(x=self.x[first:last])


def fp8_case(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Fp8Case:
    """Return normally distributed rows and weights, rounded to FP8."""
    codes, row_scales = fp8_rows(normal((shape.rows, shape.inputs), 1), shape.group)
    weight, scales = fp8_rows(
        normal((shape.outputs, shape.inputs), 2) * shape.inputs**-0.5, shape.group
    )
    bias = normal((shape.outputs,), 3) if shape.biased else None
    tensors = (codes, row_scales, weight, scales)
    moved = (tensor.to(device) for tensor in tensors)
    return Fp8Case(*moved, shape.group, None if bias is None else bias.to(device), dtype)


def int4_case(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Int4Case:
    """Return normally distributed rows and arbitrary weights with scales in float16."""
    generator = torch.Generator().manual_seed(4)
    groups = -(-shape.inputs // shape.group)

    def integers(limit: int, *size: int) -> torch.Tensor:
        return torch.randint(limit, size, dtype=torch.uint8, generator=generator)

    scales = (torch.rand(shape.outputs, groups, generator=generator) * shape.inputs**-0.5).half()
    bias = normal((shape.outputs,), 3) if shape.biased else None
    tensors = (
        normal((shape.rows, shape.inputs), 1, dtype),
        integers(256, shape.outputs, shape.inputs // 2),
        scales,
        integers(16, shape.outputs, groups),
    )
    moved = (tensor.to(device) for tensor in tensors)
    return Int4Case(*moved, shape.group, None if bias is None else bias.to(device), dtype)
