"""The interface of operators."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.rope import Rope


class RotaryTables(NamedTuple):
    """Cosines and sines of all positions, as from `rope.Rope.tables`.

    Each is [positions, rotated dimensions / 2].
    """

    cosines: Tensor
    sines: Tensor


def rotary_tables(
    config: ModelConfig,
    positions: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> dict[Rope, RotaryTables]:
    """Return the tables of a model's rotations, contiguous on the device."""
    return {
        rope: RotaryTables(
            *(
                table.contiguous().to(device)
                for table in rope.tables(config.head_dim, positions, dtype)
            )
        )
        for rope in {config.rope, *config.layer_ropes}
    }


class Operators(Protocol):
    """Operators of one model.

    The operators are stateless: `begin` returns the state of a step. The bits of a row do not
    depend on the other rows of the step.

    Attributes:
        name: library and version, a part of the numerics class.
    """

    name: str

    def begin(self, inputs: StepInputs) -> Any:
        """Return the `step` argument of the other methods, the same for all layers."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMS norm of the sum.

        Args:
            hidden, delta: [rows, hidden_size], contiguous. None as `delta` adds nothing.
            weight: float32 [hidden_size].
        """
        ...

    def rotate_and_store(
        self,
        step: Any,
        fused: Tensor,
        layer_kv: Tensor,
        qk_norm: Tensor | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the pool.

        The first dimensions of a head rotate, as many as the tables have. The others stay.

        Args:
            step: the result of `begin`.
            fused: [rows, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values. The
                method may overwrite this tensor.
            layer_kv: [2 * num_kv_heads, slots, head_dim], in the dtype of `fused` or in FP8
                (`quantisation/fp8_kv.py`).
            qk_norm: float32 [num_heads + num_kv_heads, head_dim], RMS norm weights applied before
                rotation.
            rope: rotation of the layer. None means that of the model.

        Returns:
            The rotated queries times the model's query scale: [rows, num_heads, head_dim].
        """
        ...

    def attend(self, step: Any, queries: Tensor, layer_kv: Tensor, window: int | None) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim].

        If the model has a soft cap c, the scores s = q k^T become c tanh(s / c).

        Args:
            step: the result of `begin`.
            queries: the result of `rotate_and_store`.
            layer_kv: memory of the layer, which includes the step's own keys and values.
            window: number of positions that a row attends to: from p - window + 1 to p for a row at
                position p. None means all positions up to p.
        """
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up, [rows, width], of [rows, 2 * width]."""
        ...
