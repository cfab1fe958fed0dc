"""Weights that stay packed on a CPU: blocks of GGUF files, or weights that are quantised at load.

Products round their rows to int8 (`operators/packed.py`). They need no padding, and their rows have
the same bits in any step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.checkpoint import Checkpoint, StoredTensor, TensorReader
from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.operators.compiler import library_name
from draftgate.backends.engine.operators.packed import (
    BLOCK,
    PACKED_TYPES,
    PackedMatrix,
    multiplies_packed,
    multiply,
)
from draftgate.backends.engine.quantisation.linear import StackedLinear
from draftgate.backends.engine.stored_linear import FusedModules, read_linear
from draftgate.backends.gguf.block_types import BLOCK_TYPES, BlockType

Packing = Literal["stored", "q8_0", "q4_0"]
"""Which weights stay packed: blocks that a checkpoint stores, or all, quantised to this type."""

QUANTIZATIONS: Final = ("auto", "none", "stored", "q8_0", "q4_0")

_KINDS: Final = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.name in PACKED_TYPES}


def choose_packing(
    name: str, checkpoint: Checkpoint, device: str, dtype: torch.dtype
) -> Packing | None:
    """Return the packing for a value of `--quantization`, or None if nothing stays packed.

    Args:
        name: the value of `--quantization`. `auto` keeps stored blocks packed where the machine
            can multiply them.
        checkpoint: the model.
        device: `cpu` or `cuda`.
        dtype: the dtype of the model if its weights are packed.

    Raises:
        ValueError: the name is unknown, or the machine cannot multiply packed weights.
    """
    if name not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ValueError(f"unknown quantization {name!r}; known: {known}")
    if name == "none" or (name == "auto" and device != "cpu"):
        return None
    if device != "cpu":
        raise ValueError(f"--quantization {name} needs --device cpu")
    stored = {one.dtype for one in checkpoint.tensors.values()} & PACKED_TYPES
    kinds = stored if name in {"auto", "stored"} else {"Q8_0"}
    works = all(multiplies_packed(_KINDS[kind], dtype) for kind in kinds)
    if name == "auto":
        return "stored" if stored and works else None
    if not works:
        raise ValueError(f"--quantization {name} needs gcc, which compiles its products")
    if name == "stored":
        return "stored" if stored else None
    return "q8_0" if name == "q8_0" else "q4_0"


class PackedLinear:
    """`x @ weight.T + bias` with packed matrices side by side.

    Attributes:
        padded: False, because products need no padding.
    """

    padded: Final = False

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self._parts = parts
        self.in_features = parts[0].shape[1]
        self.out_features = sum(part.shape[0] for part in parts)

    @property
    def products(self) -> list[tuple[Any, int, int]]:
        """The `product` of each matrix."""
        return [part.product for part in self._parts]

    @property
    def library(self) -> str:
        """The library of the operators."""
        return library_name()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features]."""
        return multiply(x, self._parts, wide=False)

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        return multiply(x, self._parts, wide=True)


def embedded(embedding: Tensor | PackedMatrix, token_ids: Tensor) -> Tensor:
    """Return the rows of an embedding: [tokens, hidden_size]."""
    if isinstance(embedding, PackedMatrix):
        return embedding.rows(token_ids)
    return functional.embedding(token_ids, embedding)


def packed_kind(
    stored: StoredTensor, packing: Packing | None, *, output: bool = False
) -> BlockType | None:
    """Return the block type of a loaded weight, or None if it is unpacked.

    Args:
        stored: the matrix in the checkpoint.
        packing: the packing of the model.
        output: whether the weight is the LM head or the embedding, for which `q4_0` uses Q8_0, as
            llama.cpp does where rows are too short for Q6_K.
    """
    if packing is None or stored.dtype in _KINDS:
        return None if packing is None else _KINDS[stored.dtype]
    if packing == "stored" or stored.shape[-1] % BLOCK:
        return None
    return _KINDS["Q8_0" if output or packing == "q8_0" else "Q4_0"]


def packed_formats(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    outputs: Collection[str],
    packing: Packing | None,
) -> tuple[str, ...]:
    """Return the names of the block types of a model's packed weights, ascending.

    Args:
        checkpoint: the checkpoint.
        shapes: the shape of each tensor of the model if nothing was quantised.
        outputs: names of the LM head and the embedding.
        packing: the packing of the model.
    """
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    kinds = (
        packed_kind(checkpoint.tensors[name], packing, output=name in outputs)
        for name in matrices
        if name in checkpoint.tensors
    )
    return tuple(sorted({kind.name.lower() for kind in kinds if kind is not None}))


def read_packed(
    reader: TensorReader,
    kind: BlockType,
    names: Sequence[str],
    bias: Tensor | None = None,
) -> PackedMatrix:
    """Read matrices of one block type, and return them side by side.

    Args:
        reader: an open reader of the checkpoint.
        kind: the result of `packed_kind` for every matrix.
        names: names of the tensors.
        bias: [outputs] of all matrices.
    """

    def rows(name: str) -> Tensor:
        if reader.tensors[name].dtype == kind.name:
            return reader.read_packed(name)[1]
        return quantised(kind, reader.read([name], torch.float32))

    parts = [rows(name) for name in names]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return PackedMatrix(kind, joined, reader.dtype, bias)


def read_packed_output(
    reader: TensorReader, name: str, packing: Packing | None
) -> PackedMatrix | None:
    """Return the LM head or the embedding, or None if it is unpacked."""
    stored = reader.tensors.get(name)
    kind = None if stored is None else packed_kind(stored, packing, output=True)
    return None if kind is None else read_packed(reader, kind, [name])


def read_unquantised(
    reader: TensorReader,
    modules: FusedModules,
    device: torch.device,
    packing: Packing | None,
    *,
    exact: bool,
) -> Product:
    """Read modules that no scheme quantises, and return their product.

    Args:
        reader: an open reader of the checkpoint.
        modules: the modules, with their full names.
        device: device of the product.
        packing: the packing of the model.
        exact: as in `Linear`.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read.
    """
    if packing is None:
        return read_linear(reader, modules, device, exact=exact)

    def kind_of(module: FusedModules) -> BlockType | None:
        return packed_kind(reader.tensors[f"{module.names[0]}.weight"], packing)

    runs = [
        (kind, FusedModules.joined(list(run))) for kind, run in groupby(modules.each(), kind_of)
    ]
    parts: list[Product] = []
    for is_packed, same in groupby(runs, lambda run: run[0] is not None):
        if is_packed:
            matrices = [_matrix(reader, kind, joined) for kind, joined in same if kind is not None]
            parts.append(PackedLinear(matrices))
        else:
            parts += [read_linear(reader, joined, device, exact=exact) for _, joined in same]
    return parts[0] if len(parts) == 1 else StackedLinear(parts)


def _matrix(reader: TensorReader, kind: BlockType, modules: FusedModules) -> PackedMatrix:
    biases = [f"{name}.bias" for name in modules.names] if modules.bias else []
    bias = reader.read(biases, torch.float32) if biases else None
    return read_packed(reader, kind, [f"{name}.weight" for name in modules.names], bias)


def quantised(kind: BlockType, weights: Tensor) -> Tensor:
    """Return weights in the blocks of Q8_0 or Q4_0, as `quantize_row_*_ref` of llama.cpp.

    Args:
        kind: the block type.
        weights: float32 [outputs, width], of which `BLOCK` divides the width.

    Returns:
        uint8 [outputs, row_bytes].
    """
    blocks = weights.reshape(-1, BLOCK)
    if kind.name == "Q8_0":
        scales = blocks.abs().amax(1, keepdim=True) / torch.full((), 127.0)
        codes = _half_up(blocks * _inverses(scales)).to(torch.int8).view(torch.uint8)
    else:
        largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        scales = largest / torch.full((), -8.0)
        nibbles = (blocks * _inverses(scales) + 8.5).floor().clamp(0, 15).to(torch.uint8)
        codes = nibbles[:, :16] | nibbles[:, 16:] << 4
    halves = scales.half().view(torch.uint8)
    return torch.cat([halves, codes], 1).view(len(weights), -1)


def _inverses(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, scales.reciprocal())


def _half_up(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as C's `roundf`."""
    whole = x.trunc()
    return whole + (x - whole).abs().ge(0.5) * x.sign()
