"""Float32 products of bfloat16 matrices in C, for processors without bfloat16 instructions.

The products read the stored matrix, which has half the bytes of a float32 matrix. With a 4096 x
4096 matrix, products of 4, 32 and 128 rows take 0.2, 1.1 and 1.4 times as long as oneDNN's float32
products (one thread of a Zen 4 limited to AVX2, 2026-11-22).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.operators.compiler import compiled

LANES: Final = 16
"""Divisor of the width of every matrix that C can multiply."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = compiled("products.c", BFLOAT16=1)
    if library is not None:
        library.multiply.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4)
    return library


def multiplies_in_c(width: int) -> bool:
    """Return whether this machine can multiply matrices with this number of columns in C."""
    return width % LANES == 0 and _library() is not None


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` in float32.

    A row of the product has the same bits for any other rows.

    Args:
        x: bfloat16 [rows, width].
        weight: bfloat16 [outputs, width], contiguous.

    Raises:
        MemoryError: the memory for a float32 copy of x is not available.
    """
    library = _library()
    assert library is not None
    x = x.contiguous()
    (rows, width), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs)
    pointers = (out.data_ptr(), x.data_ptr(), weight.data_ptr())
    if library.multiply(*pointers, rows, outputs, width, torch.get_num_threads()):
        raise MemoryError(f"not enough memory for {rows} x {width} numbers in float32")
    return out
