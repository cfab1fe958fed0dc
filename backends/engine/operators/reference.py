"""Operators in torch for any shape: the reference of the other operators, and their fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.operators.attention import AttentionPlan, attend, plan_attention
from draftgate.backends.engine.operators.base import RotaryTables


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The state of a step: rotations of its rows, and attention plans.

    Attributes:
        cosines: [rows, 1, rotated dimensions].
        sines: [rows, 1, rotated dimensions], with signs.
        slots: slots of the rows.
        plans: attention plans by window.
    """

    cosines: Tensor
    sines: Tensor
    slots: Tensor
    plans: dict[int | None, AttentionPlan]


class TorchOperators:
    """Implements `Operators`."""

    def __init__(self, config: ModelConfig, tables: RotaryTables) -> None:
        self.name = f"torch-{torch.__version__}"
        self._config = config
        self._tables = tables

    def begin(self, inputs: StepInputs) -> TorchStep:
        """Gather the rotations of the step's rows, and plan its attention."""
        config = self._config
        cos, sin = (table[inputs.positions] for table in self._tables)
        group = config.num_heads // config.num_kv_heads
        return TorchStep(
            torch.cat([cos, cos], -1)[:, None],
            torch.cat([-sin, sin], -1)[:, None],
            inputs.slots,
            {
                window: plan_attention(inputs.spans, group, cos.dtype, window)
                for window in set(config.windows)
            },
        )

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMS norm of the sum."""
        if delta is not None:
            hidden += delta
        return functional.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)

    def rotate_and_store(
        self, step: TorchStep, fused: Tensor, layer_kv: Tensor, qk_norm: Tensor | None
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the pool."""
        config = self._config
        heads = fused.view(len(fused), -1, config.head_dim)
        rotated = heads[:, : config.num_heads + config.num_kv_heads]
        if qk_norm is not None:
            normed = functional.rms_norm(rotated, (config.head_dim,), eps=config.rms_norm_eps)
            rotated.copy_(normed * qk_norm)
        turned = rotated[..., : step.cosines.shape[-1]]
        turned.copy_(_rotate(turned, step.cosines, step.sines))
        layer_kv.index_copy_(1, step.slots, heads[:, config.num_heads :].transpose(0, 1))
        queries: Tensor = heads[:, : config.num_heads] * config.head_dim**-0.5
        return queries

    def attend(
        self, step: TorchStep, queries: Tensor, layer_kv: Tensor, window: int | None
    ) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim]."""
        return attend(queries, layer_kv, step.plans[window])

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width]."""
        gates, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gates) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x, [rows, heads, width]: x * cos + swap_halves(x) * signed sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), -1) * sin
