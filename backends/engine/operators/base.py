"""The protocol of operators."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from draftgate.backends.engine.inputs import StepInputs


class RotaryTables(NamedTuple):
    """Cosines and sines of all positions, [positions, head_dim / 2] each (`rope.Rope.tables`)."""

    cosines: Tensor
    sines: Tensor


class Operators(Protocol):
    """Operators of one model; stateless but for what `begin` returns.

    `step` is that of `begin`. Bits of a row depend on nothing else in the step.

    Attributes:
        name: what computes, with its version: part of the numerics class.
    """

    name: str

    def begin(self, inputs: StepInputs) -> Any:
        """Return what the operators need to know of a step, the same for all layers."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden`, in place, and return it over its root mean square, weighted.

        Args:
            hidden, delta: [rows, hidden_size], contiguous.
            weight: [hidden_size].
        """
        ...

    def turn_and_store(
        self, step: Any, fused: Tensor, layer_kv: Tensor, qk_norm: Tensor | None
    ) -> Tensor:
        """Write a step's keys, turned by their positions, and values to the pool.

        Args:
            fused: [rows, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values. May be
                changed.
            layer_kv: [2 * num_kv_heads, slots, head_dim].
            qk_norm: [num_heads + num_kv_heads, head_dim]; queries and keys are normed by it first.

        Returns:
            The queries, turned and scaled by head_dim ** -0.5: [rows, num_heads, head_dim].
        """
        ...

    def attend(self, step: Any, queries: Tensor, layer_kv: Tensor, window: int | None) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim].

        Args:
            queries: as `turn_and_store` returns them.
            layer_kv: with the step's own keys and values in it.
            window: a row at position p sees positions p - window + 1 to p; None: all up to p.
        """
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width], of [rows, 2 * width]."""
        ...
