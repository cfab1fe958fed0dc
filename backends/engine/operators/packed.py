"""Products with matrices that stay packed in a block format of GGUF (`packed.c`).

An output depends on its row and its weights only, so rows have the same bits in any batch, without
padding, with any number of threads and on any instruction set.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.operators.compiler import compiled
from draftgate.backends.gguf.block_types import BlockType

BLOCK: Final = 32
"""Divisor of the width of every packed matrix."""

PACKED_TYPES: Final = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
)
"""Names of the block types that C multiplies."""

_ROW_BLOCK_BYTES: Final = 48
"""Size of the struct `RowBlock` of `packed.c`."""

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class _Matrix(ctypes.Structure):
    """The struct `Matrix` of `packed.c`."""

    _fields_ = (
        ("codes", _Pointer), ("scales", _Pointer), ("bias", _Pointer),
        ("outputs", _Int), ("width", _Int),
    )  # fmt: skip


@lru_cache(maxsize=32)
def _library(number: int, *, rounds: bool) -> ctypes.CDLL | None:
    """Return the library of a block type, for rows in bfloat16 if `rounds`, otherwise float32."""
    library = compiled("packed.c", TYPE=number, BFLOAT16=int(rounds))
    if library is None:
        return None
    for size in (library.code_bytes, library.scale_bytes):
        size.argtypes, size.restype = (_Int, _Int), _Int
    library.pack.argtypes = (*[_Pointer] * 3, *[_Int] * 3)
    library.unpack_rows.argtypes = (*[_Pointer] * 3, *[_Int] * 2)
    library.multiply_packed.argtypes = (*[_Pointer] * 4, *[_Int] * 4)
    library.pack.restype = library.unpack_rows.restype = None
    return library


def multiplies_packed(kind: BlockType, dtype: torch.dtype) -> bool:
    """Return whether this machine can multiply rows of a dtype by matrices of a block type."""
    rounds = dtype is torch.bfloat16
    return kind.name in PACKED_TYPES and _library(kind.number, rounds=rounds) is not None


class PackedMatrix:
    """A matrix in a block format, with a group of outputs side by side.

    Attributes:
        kind: the block type.
        shape: numbers of outputs and inputs.
        dtype: dtype of the rows to multiply.
        product: for `multiply`, the function of the library, the address of the struct, and the
            number of outputs.
    """

    device: Final = torch.device("cpu")

    def __init__(
        self, kind: BlockType, rows: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        """Interleave the rows of a file.

        Args:
            kind: the block type, for which `multiplies_packed`.
            rows: uint8 [outputs, row_bytes].
            dtype: float32 or bfloat16, the dtype of the rows to multiply.
            bias: [outputs].
        """
        library = _library(kind.number, rounds=dtype is torch.bfloat16)
        assert library is not None
        rows = rows.contiguous()
        outputs, width = len(rows), rows.shape[1] // kind.num_bytes * kind.values
        self.kind, self.shape, self.dtype = kind, (outputs, width), dtype
        self._codes = torch.empty(library.code_bytes(outputs, width), dtype=torch.uint8)
        self._scales = torch.empty(library.scale_bytes(outputs, width), dtype=torch.uint8)
        self._bias = None if bias is None else bias.float().contiguous()
        pointers = (rows.data_ptr(), self._codes.data_ptr(), self._scales.data_ptr())
        library.pack(*pointers, outputs, width, torch.get_num_threads())
        added = None if self._bias is None else self._bias.data_ptr()
        self._struct = _Matrix(*pointers[1:], added, outputs, width)
        self._address = ctypes.addressof(self._struct)
        self._unpack = library.unpack_rows
        self.product = library.multiply_packed, self._address, outputs

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed matrix."""
        return self._codes.nbytes + self._scales.nbytes

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the weights of some outputs: [outputs, width] in the dtype of the rows.

        Args:
            outputs: int64 indices, at least 0 and less than the number of outputs.
        """
        outputs = outputs.contiguous()
        out = torch.empty(len(outputs), self.shape[1], dtype=self.dtype)
        pointers = (out.data_ptr(), self._address, outputs.data_ptr())
        self._unpack(*pointers, len(outputs), torch.get_num_threads())
        return out


def multiply(x: Tensor, parts: Sequence[PackedMatrix], *, wide: bool) -> Tensor:
    """Return the products of rows with matrices side by side, plus their biases.

    The rows are rounded to int8 once for all matrices.

    Args:
        x: [rows, width], in the dtype of the matrices.
        parts: matrices of the same width and dtype.
        wide: whether to return float32 instead of the dtype of x.

    Raises:
        MemoryError: the memory for unpacked weights is not available.
    """
    # Python's share of a step is a third for small models. Allocations and calls of torch count.
    x = x.contiguous()
    rows, width = x.shape
    products = [part.product for part in parts]
    outputs = sum([count for _, _, count in products])
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty(rows, outputs, dtype=dtype)
    source: int | None = x.data_ptr()
    at, threads = out.data_ptr(), torch.get_num_threads()
    blocks = row_memory(rows, width)
    for product, matrix, count in products:
        if product(at, source, blocks, matrix, rows, outputs, wide, threads):
            raise MemoryError(f"not enough memory for {threads} unpacked parts of a matrix")
        source, at = None, at + count * dtype.itemsize
    return out


class _Scratch(threading.local):
    """Memory for the rounded rows of a product, which a thread keeps for its next products."""

    memory = torch.empty(0, dtype=torch.uint8)
    address = 0


_scratch = _Scratch()


def row_memory(rows: int, width: int) -> int:
    """Return the address of memory for rounded rows, until the next call in this thread."""
    num_bytes = rows * (width // BLOCK) * _ROW_BLOCK_BYTES
    if num_bytes > _scratch.memory.nbytes:
        _scratch.memory = torch.empty(num_bytes, dtype=torch.uint8)
        _scratch.address = _scratch.memory.data_ptr()
    return _scratch.address
