"""Keys and values in FP8 (E4M3), as references of the operators.

A key after its rotation, or a value, is rounded to the nearest number of E4M3, ties to even, within
+-448. The scale is 1, the default of vLLM without calibration. So the bits of a token's keys and
values depend on nothing but the token and those before it. Keys and values must not be NaN, which
the operators round to different numbers.

All rows of a step read the rounded numbers, those of the step included. Otherwise the chunks of a
prompt would change the text.

Memory in FP8 is a tensor of `torch.float8_e4m3fn`. torch neither copies nor indexes this dtype on
all devices, so `as_cells` views it as bytes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.quantisation.e4m3 import fp8, widened

FP8: Final = torch.float8_e4m3fn


def as_cells(kv: Tensor) -> Tensor:
    """Return a view of keys and values that torch copies and indexes: FP8 as uint8."""
    return kv.view(torch.uint8) if kv.dtype is FP8 else kv


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys and values of any shape as the cells of memory in a dtype."""
    return as_cells(fp8(x) if dtype is FP8 else x.to(dtype))


def read(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys and values of any shape in a dtype that holds all numbers of E4M3."""
    return (widened(kv) if kv.dtype is FP8 else kv).to(dtype)
