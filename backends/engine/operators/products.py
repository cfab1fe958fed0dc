"""Float32 products of bfloat16 matrices in C, which read the stored matrix.

Without bfloat16 instructions, the stored matrix has half the bytes of a float32 copy. With a 4096 x
4096 matrix, products of 4, 32 and 128 rows take 0.2, 1.1 and 1.4 times as long as oneDNN's float32
products (one thread of a Zen 4 limited to AVX2, 2026-11-22).

With matrix tiles (AMX), the LM head of SmolLM2-135M takes 4.7 ms for 16 rows and 12 ms for 64,
instead of 12.4 and 34 ms (one thread of a Xeon with AMX, busy, 2026-11-28).
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.operators.compiler import compiled

log = logging.getLogger(__name__)

LANES: Final = 16
"""Divisor of the width of every matrix that C can multiply."""

TILE_WIDTH, TILE_OUTPUTS = 32, 32
"""Divisors of the width and of the outputs of matrices that C multiplies in tiles."""

_PROBE: Final = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).request_tiles())"
_PROBE_TIMEOUT_S: Final = 30.0


def _uses_amx() -> bool:
    """Return whether oneDNN uses AMX, which `ONEDNN_MAX_CPU_ISA` may disable."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    supported: bool = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 (no public one)
    return supported and (most in {"ALL", "DEFAULT"} or "AMX" in most)


USES_AMX: Final = _uses_amx()


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = compiled("products.c", BFLOAT16=1)
    if library is not None:
        products = [library.multiply]
        if hasattr(library, "multiply_in_tiles"):
            products.append(library.multiply_in_tiles)
        for product in products:
            product.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4)
    return library


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Return whether C can multiply in matrix tiles on this machine."""
    library = _library()
    if library is None or not USES_AMX or not hasattr(library, "multiply_in_tiles"):
        return False
    # Some machines list AMX and kill the process that uses it, so a child process tries first.
    done = subprocess.run(  # noqa: S603 (our own interpreter and library)
        [sys.executable, "-c", _PROBE, library._name],  # noqa: SLF001 (no public one)
        check=False,
        capture_output=True,
        timeout=_PROBE_TIMEOUT_S,
    )
    works = done.returncode == 0 and library.request_tiles() == 0
    if not works:
        log.warning("the processor lists AMX, but this process may not use it")
    return works


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
        MemoryError: the memory for a copy of x is not available.
    """
    library = _library()
    assert library is not None
    x = x.contiguous()
    (rows, width), outputs = x.shape, len(weight)
    in_tiles = width % TILE_WIDTH == 0 and outputs % TILE_OUTPUTS == 0 and has_tiles()
    product = library.multiply_in_tiles if in_tiles else library.multiply
    out = torch.empty(rows, outputs)
    pointers = (out.data_ptr(), x.data_ptr(), weight.data_ptr())
    if product(*pointers, rows, outputs, width, torch.get_num_threads()):
        raise MemoryError(f"not enough memory for a copy of {rows} x {width} numbers")
    return out
