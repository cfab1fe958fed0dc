"""Reads the products of a checkpoint, quantised or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch

from draftgate.backends.engine.checkpoint import (
    PACKED_DTYPES,
    Checkpoint,
    StoredTensor,
    TensorReader,
)
from draftgate.backends.engine.fields import Fields
from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.quantisation.fp8 import (
    FP8_DTYPE,
    INPUT_SCALE,
    Fp8Weight,
    input_scale,
    read_fp8,
    require_fp8,
)
from draftgate.backends.engine.quantisation.int4 import (
    PACKED_WEIGHTS,
    Int4Weight,
    input_order,
    read_int4,
    require_int4,
    unpacked_shape,
)
from draftgate.backends.engine.quantisation.linear import QuantisedLinear, StackedLinear
from draftgate.backends.engine.quantisation.packed import Packing, packed_kind, read_unquantised
from draftgate.backends.engine.quantisation.scheme import (
    Fp8Scheme,
    Int4Scheme,
    Scheme,
    quantises,
    read_scheme,
)
from draftgate.backends.engine.stored_linear import FusedModules
from draftgate.backends.tokenizer import read_json

PARTS: Final = frozenset(
    {"scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point"}
    | {"weight_shape", INPUT_SCALE}
)
"""Kinds of tensors that belong to a packed weight."""


def require_weights(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    unquantised: Iterable[str],
    scheme: Scheme | None,
) -> int:
    """Check that a checkpoint has the tensors of a model, and return their bytes.

    Args:
        checkpoint: the checkpoint.
        shapes: the shape of each tensor if nothing was quantised.
        unquantised: matrices that no scheme quantises, such as the embedding.
        scheme: the scheme of all other matrices, or None.

    Raises:
        CheckpointError: a check failed. The message names the file and the tensor.
    """
    kept = set(unquantised)

    def require(name: str, shape: tuple[int, ...]) -> int:
        module = name.removesuffix(".weight")
        if len(shape) != 2 or name in kept or not quantises(scheme, module):
            return checkpoint.require_tensor(name, (shape,))
        if isinstance(scheme, Fp8Scheme):
            return require_fp8(checkpoint, module, *shape, scheme)
        assert isinstance(scheme, Int4Scheme)
        return require_int4(checkpoint, module, *shape, scheme)

    return sum(require(name, shape) for name, shape in shapes.items())


_OUTPUTS: Final = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of the embedding and the LM head."""


def loaded_bytes(directory: Path, dtype: torch.dtype, packing: Packing | None = None) -> int:
    """Return the bytes of all tensors of a checkpoint after loading.

    A quantised weight has scales of every output, and zeros of a byte, which may take 3% more than
    in the checkpoint.

    Args:
        directory: directory of a model or a head.
        dtype: dtype of the tensors that are not quantised.
        packing: which weights stay packed, on a CPU.
    """
    path = directory / "config.json"
    scheme = read_scheme(Fields(read_json(path), str(path)))

    def loaded(name: str, stored: StoredTensor) -> int:
        kind = name.rpartition(".")[2]
        if isinstance(scheme, Fp8Scheme) and stored.dtype == FP8_DTYPE:
            return scheme.loaded_bytes(*stored.shape)
        if isinstance(scheme, Int4Scheme) and kind in PACKED_WEIGHTS:
            return scheme.loaded_bytes(*unpacked_shape(stored.shape, scheme))
        if scheme is not None and kind in PARTS:
            return 0
        if len(stored.shape) == 2:
            block = packed_kind(stored, packing, output=name.endswith(_OUTPUTS))
            if block is not None:
                return math.prod(stored.shape) // block.values * block.num_bytes
        if stored.dtype in PACKED_DTYPES:
            return stored.num_bytes
        return math.prod(stored.shape) * dtype.itemsize

    return sum(loaded(name, stored) for name, stored in Checkpoint(directory).tensors.items())


def read_product(
    reader: TensorReader,
    modules: FusedModules,
    device: torch.device,
    scheme: Scheme | None,
    packing: Packing | None = None,
    *,
    exact: bool,
    for_gpu: bool,
) -> Product:
    """Read modules and return their product, with all outputs side by side.

    Args:
        reader: an open reader of the checkpoint.
        modules: the modules, with their full names.
        device: device of the product.
        scheme: the scheme of the checkpoint, or None.
        packing: the packing of weights that the scheme does not quantise.
        exact: as in `Linear`.
        for_gpu: whether to multiply with a quantised weight in the kernels of a GPU.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read, or a tensor holds
            a value that no weight has.
    """
    if scheme is None:
        return read_unquantised(reader, modules, device, packing, exact=exact)
    keyed = [(_key(reader, part, scheme), part) for part in modules.each()]

    def read(key: tuple[bool, Any], parts: Iterable[FusedModules]) -> Product:
        joined, (quantised, shared) = FusedModules.joined(list(parts)), key
        if not quantised:
            return read_unquantised(reader, joined, device, packing, exact=exact)
        return _read(reader, joined, device, scheme, shared, exact=exact, for_gpu=for_gpu)

    runs = groupby(keyed, lambda pair: pair[0])
    parts = [read(key, (part for _, part in run)) for key, run in runs]
    return parts[0] if len(parts) == 1 else StackedLinear(parts)


def _key(reader: TensorReader, module: FusedModules, scheme: Scheme) -> tuple[bool, Any]:
    """Return whether a module is quantised, and what it must share with a fused module."""
    (name,) = module.names
    if not quantises(scheme, name):
        return False, None
    if isinstance(scheme, Fp8Scheme):
        return True, input_scale(reader, name, scheme)
    return True, input_order(reader, name, module.inputs, scheme)


def _read(
    reader: TensorReader,
    modules: FusedModules,
    device: torch.device,
    scheme: Scheme,
    shared: Any,
    *,
    exact: bool,
    for_gpu: bool,
) -> Product:
    """Return the product of quantised modules, which share what `_key` returns."""
    weight: Fp8Weight | Int4Weight
    if isinstance(scheme, Fp8Scheme):
        weight = read_fp8(reader, modules, scheme, shared, device)
    else:
        weight = read_int4(reader, modules, scheme, shared, device)
    names = [f"{name}.bias" for name in modules.names] if modules.bias else []
    bias = reader.read(names).to(device) if names else None
    if not for_gpu:
        return QuantisedLinear(weight, bias)
    # Some machines lack Triton.
    from draftgate.backends.engine.quantisation.kernels import KernelLinear

    return KernelLinear(weight, bias, exact=exact)
