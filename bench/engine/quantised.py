"""Random matrices in the formats of quantised checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.quantisation.e4m3 import fp8_rows
from draftgate.backends.engine.quantisation.fp8 import Fp8Weight
from draftgate.backends.engine.quantisation.int4 import MIDDLE, Int4Weight
from draftgate.backends.engine.quantisation.linear import QuantisedLinear
from draftgate.backends.engine.quantisation.nibbles import pack
from draftgate.backends.engine.quantisation.scheme import Fp8Scheme, Scheme


def quantised(weight: Tensor, scheme: Scheme) -> Fp8Weight | Int4Weight:
    """Return a matrix `[outputs, inputs]` in a format, rounded to the nearest numbers.

    Every output has scales of its own, which an engine also stores for scales per block.
    """
    outputs, inputs = weight.shape
    if isinstance(scheme, Fp8Scheme):
        group = inputs if scheme.block is None else scheme.block[1]
        return Fp8Weight(*fp8_rows(weight, group), group)
    group = scheme.group or inputs
    groups = -(-inputs // group)
    grouped = functional.pad(weight.float(), (0, groups * group - inputs))
    grouped = grouped.view(outputs, groups, group)
    scales = grouped.abs().amax(-1).clamp(min=1e-6) / (MIDDLE - 1)
    codes = (grouped / scales[..., None]).round().add_(MIDDLE).to(torch.uint8)
    zeros = torch.full((outputs, groups), MIDDLE, dtype=torch.uint8, device=weight.device)
    return Int4Weight(pack(codes.view(outputs, -1)[:, :inputs]), scales.half(), zeros, group)


def product(weight: Fp8Weight | Int4Weight, device: torch.device, *, exact: bool) -> Product:
    """Return the product of a device with a quantised weight."""
    if device.type == "cpu":
        return QuantisedLinear(weight)
    # Some machines lack Triton.
    from draftgate.backends.engine.quantisation.kernels import KernelLinear

    return KernelLinear(weight, exact=exact)
