"""Reads rows of tensors from mapped GGUF files, packed or as values."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from draftgate.backends.engine.gguf.blocks import unpack
from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.architectures import SourceTensor

_SMALL_VALUES = 1 << 22
"""Size of a tensor in values below which one thread unpacks it.

Operations on a small tensor are too short to wait for other threads. Beside other work on two
cores, the matrices of SmolLM2-135M in Q4_1 took 0.5 to 0.6 CPU seconds in two threads, and take 0.3
in one (AMD EPYC with AVX-512, 2026-11-29).
"""

_PIECE_VALUES, _SMALL_PIECE_VALUES = 1 << 18, 1 << 15
"""Values that are unpacked at once, of a large and of a small tensor.

Intermediate results of this size stay in the cache of a core, whereas those of a whole embedding of
Gemma would take several gigabytes. torch has one thread for operations on up to 32,768 values.
"""


def map_file(path: Path) -> Tensor:
    """Return the bytes of a file, uint8 `[size]`, which the system reads on first use.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise CheckpointError(f"cannot read {path}: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tensor is only read
        return torch.frombuffer(data, dtype=torch.uint8)


def packed_rows(data: Tensor, source: SourceTensor) -> Tensor:
    """Return the rows of a tensor in the order of the Hugging Face layout, without unpacking.

    Args:
        data: the bytes of the file.
        source: where the tensor is.

    Returns:
        uint8 `[rows, row_bytes]`, which shares memory with `data` unless the file permutes rows.

    Raises:
        CheckpointError: the file was truncated after its header was read.
    """
    end = source.offset + source.rows * source.row_bytes
    if end > len(data):
        raise CheckpointError(f"damaged {source.stored.path}: it ends before one of its tensors")
    rows = data[source.offset : end].view(source.rows, source.row_bytes)
    if source.permuted_heads is None:
        return rows
    # Rows 0, 2, 4, ... of a head, and then rows 1, 3, 5, ... Single heads are so small that torch
    # copies them in one thread.
    ordered = torch.empty_like(rows)
    heads = ordered.view(source.permuted_heads, 2, -1, source.row_bytes)
    pairs = rows.view(source.permuted_heads, -1, 2, source.row_bytes)
    for head, pair in zip(heads, pairs, strict=True):
        head.copy_(pair.transpose(0, 1))
    return ordered


def copy_values(rows: Tensor, source: SourceTensor, target: Tensor) -> None:
    """Write the values of packed rows to a tensor of any floating-point dtype.

    Args:
        rows: uint8 `[rows, row_bytes]`.
        source: the tensor.
        target: a tensor of the shape of `source`.
    """
    values = target.view(len(rows), -1)
    for piece in _pieces(*values.shape):
        values[piece].copy_(unpack(source.stored.kind, rows[piece]))


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    small = rows * columns < _SMALL_VALUES
    step = max((_SMALL_PIECE_VALUES if small else _PIECE_VALUES) // columns, 1)
    return (slice(start, start + step) for start in range(0, rows, step))
