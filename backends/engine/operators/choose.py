"""Chooses the operators of a model."""

from __future__ import annotations

import torch

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.operators.base import Operators, rotary_tables
from draftgate.backends.engine.operators.native import native_operators
from draftgate.backends.engine.operators.reference import TorchOperators


def operators_for(
    config: ModelConfig, dtype: torch.dtype, max_positions: int, device: torch.device = CPU
) -> Operators:
    """Return the fastest operators for a model on a device.

    Args:
        config: shape of the model.
        dtype: dtype of the weights.
        max_positions: maximum tokens of a context.
        device: device of the weights.
    """
    if device.type == "cuda":
        # Some machines lack Triton, and its import is slow.
        from draftgate.backends.engine.operators.triton import triton_operators

        return triton_operators(config, max_positions, device)
    tables = rotary_tables(config, max_positions, dtype)
    return native_operators(config, tables, dtype) or TorchOperators(config, tables)
