"""Reads the products of a checkpoint, quantised or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.quantisation.fp8 import input_scale, read_fp8, require_fp8
from draftgate.backends.engine.quantisation.int4 import input_order, read_int4, require_int4
from draftgate.backends.engine.quantisation.linear import (
    QuantisedLinear,
    QuantisedWeight,
    StackedLinear,
)
from draftgate.backends.engine.quantisation.scheme import (
    Fp8Scheme,
    Int4Scheme,
    Scheme,
    quantises,
)
from draftgate.backends.engine.stored_linear import FusedModules, read_linear


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


def read_product(
    reader: TensorReader,
    modules: FusedModules,
    device: torch.device,
    scheme: Scheme | None,
    *,
    exact: bool,
) -> Product:
    """Read modules and return their product, with all outputs side by side.

    Args:
        reader: an open reader of the checkpoint.
        modules: the modules, with their full names.
        device: device of the product.
        scheme: the scheme of the checkpoint, or None.
        exact: as in `Linear`.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read.
    """
    if scheme is None:
        return read_linear(reader, modules, device, exact=exact)
    keyed = [(_key(reader, part, scheme), part) for part in modules.each()]
    parts = [
        _read(
            reader, FusedModules.joined([part for _, part in run]), device, scheme, key, exact=exact
        )
        for key, run in groupby(keyed, lambda pair: pair[0])
    ]
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
    key: tuple[bool, Any],
    *,
    exact: bool,
) -> Product:
    quantised, shared = key
    if not quantised:
        return read_linear(reader, modules, device, exact=exact)
    weight: QuantisedWeight
    if isinstance(scheme, Fp8Scheme):
        weight = read_fp8(reader, modules, scheme, shared, device)
    else:
        weight = read_int4(reader, modules, scheme, shared, device)
    bias = [f"{name}.bias" for name in modules.names] if modules.bias else []
    return QuantisedLinear(weight, reader.read(bias).to(device) if bias else None)
