"""Matrix products whose rows do not depend on the number of rows.

A row must have the same bits alone, in a verify step and in a prefill chunk. On a CPU, oneDNN
guarantees equal bits for products of at least `MIN_ROWS` rows. For a single row, oneDNN uses
another kernel if the inner size exceeds about a thousand.

Measurements with cancelling terms, which leave only rounding errors, confirm this guarantee. They
covered 80 shapes up to 14336 inner columns and 151936 outputs, with 1 and 2 threads. The products
used float32 and bfloat16, and packed and dense weights. All numbers of rows from 4 to 512 give
equal bits (AMD EPYC Zen 4, 2026-11-21).

With AMX, bfloat16 products change kernels above 32 rows, so `EXACT_ROWS` limits their rows. The
worker tests its own machine at start (`warmup.rows_are_exact`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from draftgate.backends.engine.operators.compiler import library_name
from draftgate.backends.engine.operators.products import USES_AMX, multiplies_in_c, multiply


def _onednn_multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 with instructions for it.

    oneDNN also supports AVX-512 without them, but then takes 2.4 times as long as for float32, and
    2.7 times as long as `products.c` (a row by 2048 x 2048, Xeon without AVX512-BF16, 2026-11-29).
    """
    without = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not without  # noqa: SLF001


ONEDNN_BFLOAT16: Final[bool] = _onednn_multiplies_bfloat16()
"""Whether oneDNN multiplies bfloat16 fast, as with AVX512-BF16, AMX or AVX-NE-CONVERT.

Otherwise, `Linear` computes products with a bfloat16 weight in float32 and rounds them.
"""

ROW_TILE: Final = 16 if USES_AMX else 1
MIN_ROWS: Final = 16 if USES_AMX else 4
"""Minimum rows of a product. `Linear` also pads the rows to multiples of `ROW_TILE` and from
`ROW_MULTIPLES`.

With matrix tiles (AMX), 16 rows are exact and cost as much as one row. Without AMX, products of 4
to 6 rows are the fastest: they read a float32 matrix of 256 MiB at 22 to 24 GB/s. A single row
reads it at 16 GB/s, 8 rows at 17 and 16 rows at 11. The bfloat16 rates are the same (one thread of
a Zen 4, which reads at most 30 GB/s, 2026-11-21).
"""

WIDENED_BYTES: Final = 1 << 20
"""Float32 bytes of each part of a weight that a product widens: a quantised weight, or a bfloat16
weight that neither oneDNN nor C can multiply."""

PACKED_FOR: Final = 16
"""Number of rows for which oneDNN chooses the layout of packed weights. Products of any size may
use the layout."""

EXACT_ROWS: Final = 32
"""Maximum rows of a bfloat16 product with exact bits."""

GPU_EXACT_ROWS: Final = 128
"""Rows of every product on a GPU with exact bits: one shape per weight, and therefore one kernel.

The value is the tile of a Hopper matrix instruction for two warp groups. A GPU can multiply 184
rows while it reads a weight (790 TFLOP/s over 4.3 TB/s in bfloat16). Padding should therefore cost
decodes little. Prefill reads a weight once per tile. These rates are from the data sheet, not
measured.
"""

ROW_MULTIPLES: Final = ((16, 1), (32, 2), (64, 8), (128, 16))
"""Pairs (maximum rows, multiple). `padded_rows` pads products of up to this number of rows to the
multiple.

The multiples limit the size of two caches. For each number of rows and shape of weight, torch keeps
a descriptor and oneDNN a kernel, 0.28 MB each. Only the environment can set the capacity of 1,024
entries, before the import of torch (`LRU_CACHE_CAPACITY`, `ONEDNN_PRIMITIVE_CACHE_CAPACITY`).

An earlier list of 53 numbers up to 512 rows made the memory of a node grow for twenty minutes. The
current 29 numbers take 85 MB for the five shapes of the shipped model, and the same for its draft
model (AMD EPYC Zen 4, torch 2.13, 2026-11-21). Decodes of few rows get at most one row of padding.
A product of 65 rows gets the largest share, about a quarter.
"""

MAX_ROWS: Final = ROW_MULTIPLES[-1][0]
"""Maximum rows of a part. `Linear` splits longer products into parts, so that they need no further
kernels.

The time per row is within 2% of that of 512 rows, for weights of 256 x 1024 to 768 x 2304. Parts of
64 rows take up to 5% longer (one thread of a Zen 4, 2026-11-21).
"""


def padded_rows(rows: int) -> int:
    """Return the number of rows of a product including padding, or 0 for no rows."""
    whole, rest = divmod(rows, MAX_ROWS)
    if not rest:
        return rows
    multiple = max(next(multiple for most, multiple in ROW_MULTIPLES if rest <= most), ROW_TILE)
    return whole * MAX_ROWS + max(MIN_ROWS, -(-rest // multiple) * multiple)


PRODUCT_ROWS: Final = tuple(sorted({padded_rows(rows) for rows in range(1, MAX_ROWS + 1)}))
"""All possible numbers of rows of a product on a CPU."""


# Use private operators of torch, because the public operators pack the weight in every call.
_pack: Final[Any] = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_product: Final[Any] = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


class Product(Protocol):
    """`x @ weight.T + bias` for a weight in any format. A row does not depend on the others."""

    in_features: int
    out_features: int

    @property
    def padded(self) -> bool:
        """Whether the bits or the speed of products need the rows of `padded_rows`."""

    @property
    def library(self) -> str | None:
        """The library of float32 products, or None for torch."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""


class Linear:
    """`x @ weight.T + bias`, with the weight in the fastest layout for its device."""

    padded: Final = True

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        exact: bool = False,
        pack: bool = True,
    ) -> None:
        """Take a weight of shape [out_features, in_features].

        Args:
            weight: a matrix that the caller may free if `pack` is true, because packing copies it.
            bias: [out_features].
            exact: whether to limit bfloat16 products on a CPU to `EXACT_ROWS` rows. The limit slows
                prefill, by about a tenth for a step of 256 tokens (Zen 4). float32 needs no limit.
                On a GPU all exact products have `GPU_EXACT_ROWS` rows.
            pack: whether to copy the weight into the fastest layout. Without the copy, a tied
                embedding is stored once and the bits are the same. The product then takes 1.8 to
                2.5 times as long for 4 rows, and 1.3 to 1.5 times for 32 (Zen 4).
        """
        self.out_features, self.in_features = weight.shape
        on_gpu, rounds = weight.device.type == "cuda", weight.dtype is torch.bfloat16
        on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._native = on_cpu and (ONEDNN_BFLOAT16 or not rounds)
        self._weight = weight.contiguous()
        packed = self._native and pack
        if packed:
            self._weight = _pack(self._weight, PACKED_FOR)
        # C reads the weight once for a float32 product, oneDNN twice.
        self._in_c = on_cpu and rounds and not packed and multiplies_in_c(self.in_features)
        self._widens = on_cpu and not self._native
        self._bias = bias
        self._most_rows = None if on_gpu else EXACT_ROWS if exact and rounds else MAX_ROWS
        self._tile_rows = GPU_EXACT_ROWS if exact and on_gpu else None

    @property
    def library(self) -> str | None:
        """The library of float32 products, or None for torch."""
        return library_name() if self._in_c else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""
        return self._in_parts(self._multiply, x)

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32, even if the weight and x are bfloat16.

        The method computes a bfloat16 product as the sum of two bfloat16 numbers: the rounded
        product and its rounding error. A second product that subtracts the first before rounding
        returns this error. The relative error falls from 2^-9 to 2^-17, for twice the time. A
        float32 copy of the weight would take the same time and twice the memory. Widening tiles of
        the weight would take three times as long.
        """
        return self._in_parts(self._multiply_wide, x)

    def _in_parts(self, multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._tile_rows is not None:
            return _in_tiles(multiply, x, self._tile_rows)
        if self._most_rows is None or len(x) <= self._most_rows:
            return multiply(x)
        return torch.cat([multiply(part) for part in x.split(self._most_rows)])

    def _multiply(self, x: Tensor) -> Tensor:
        if self._widens:
            return self._multiply_wide(x).to(x.dtype)
        if self._native:
            product: Tensor = _product(x, self._weight, self._bias, "none", [], "")
            return product
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def _multiply_wide(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype is not torch.float32 and self._bias is None:
            # cuBLAS sums in float32 and can return the sums unrounded.
            return torch.mm(x, self._weight.T, out_dtype=torch.float32)
        if self._in_c or self._widens:
            out = multiply(x, self._weight) if self._in_c else _widened_product(x, self._weight)
            return out if self._bias is None else out + self._bias
        rounded = self._multiply(x)
        if rounded.dtype is torch.float32:
            return rounded
        if not self._native:
            return rounded.float()
        lost: Tensor = _product.binary(x, rounded.neg(), self._weight, self._bias, "add")
        return rounded.float() + lost.float()


def _widened_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the float32 product of bfloat16 tensors."""

    def widened(first: int, last: int) -> Tensor:
        return weight[first:last].float()

    return float32_product(x.float(), len(weight), widened)


def float32_product(x: Tensor, outputs: int, dense: Callable[[int, int], Tensor]) -> Tensor:
    """Return a float32 product with a weight of which only one part is in float32 at a time.

    Args:
        x: float32 [rows, in_features].
        outputs: rows of the weight.
        dense: returns the float32 rows of the weight from one index to before another.
    """
    # A power of two divides most weights, so that oneDNN needs few kernels.
    step = 1 << max(0, (WIDENED_BYTES // (4 * x.shape[1])).bit_length() - 1)
    out = x.new_empty(len(x), outputs)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        part = dense(first, last)
        for rows in range(0, len(x), MAX_ROWS):
            out[rows : rows + MAX_ROWS, first:last] = _float32(x[rows : rows + MAX_ROWS], part)
    return out


def _float32(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(x, weight)
    product: Tensor = _product(x, weight, None, "none", [], "")
    return product


def _in_tiles(multiply: Callable[[Tensor], Tensor], x: Tensor, tile_rows: int) -> Tensor:
    """Multiply tiles of `tile_rows` rows, and pad the last tile with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % tile_rows))
    tiles = [multiply(tile) for tile in padded.split(tile_rows)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: len(x)]
