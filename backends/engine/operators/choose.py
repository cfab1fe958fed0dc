"""Which operators a model gets."""

from __future__ import annotations

import torch

from backends.engine.config import ModelConfig
from backends.engine.operators.base import Operators, RotaryTables
from backends.engine.operators.native import native_operators
from backends.engine.operators.reference import TorchOperators


def operators_for(config: ModelConfig, dtype: torch.dtype, max_positions: int) -> Operators:
    """Return the fastest operators that serve a model on this machine.

    Args:
        max_positions: positions that will be asked for.
    """
    tables = RotaryTables(*config.rope.tables(config.head_dim, max_positions, dtype))
    return native_operators(config, tables, dtype) or TorchOperators(config, tables)
