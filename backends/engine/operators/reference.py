"""Operators in torch for any shape: the reference of the other operators, and their fallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.operators.attention import AttentionPlan, attend, plan_attention
from draftgate.backends.engine.operators.base import RotaryTables
from draftgate.backends.engine.quantisation.fp8_kv import as_cells, stored
from draftgate.backends.engine.rope import Rope


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The state of a step: rotations of its rows, and attention plans.

    Attributes:
        rotations: by rotation, the cosines of the rows and their sines with signs, [rows, 1,
            rotated dimensions] each.
        slots: slots of the rows.
        plans: attention plans by window.
    """

    rotations: dict[Rope, tuple[Tensor, Tensor]]
    slots: Tensor
    plans: dict[int | None, AttentionPlan]


class TorchOperators:
    """Implements `Operators`."""

    def __init__(self, config: ModelConfig, tables: Mapping[Rope, RotaryTables]) -> None:
        self.name = f"torch-{torch.__version__}"
        self._config = config
        self._tables = tables
        self._dtype = tables[config.rope].cosines.dtype
        self._gate = _GATES[config.activation]

    def begin(self, inputs: StepInputs) -> TorchStep:
        """Gather the rotations of the step's rows, and plan its attention."""
        config = self._config
        group = config.num_heads // config.num_kv_heads
        return TorchStep(
            {rope: _rotations(table, inputs.positions) for rope, table in self._tables.items()},
            inputs.slots,
            {
                window: plan_attention(inputs.spans, group, self._dtype, window)
                for window in set(config.windows)
            },
        )

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMS norm of the sum."""
        if delta is not None:
            hidden += delta
        return _rms_norm(hidden, weight, self._config.rms_norm_eps)

    def rotate_and_store(
        self,
        step: TorchStep,
        fused: Tensor,
        layer_kv: Tensor,
        qk_norm: Tensor | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the pool."""
        config = self._config
        heads = fused.view(len(fused), -1, config.head_dim)
        rotated = heads[:, : config.num_heads + config.num_kv_heads]
        if qk_norm is not None:
            rotated.copy_(_rms_norm(rotated, qk_norm, config.rms_norm_eps))
        cosines, sines = step.rotations[rope or config.rope]
        turned = rotated[..., : cosines.shape[-1]]
        turned.copy_(_rotate(turned, cosines, sines))
        kv = stored(heads[:, config.num_heads :].transpose(0, 1), layer_kv.dtype)
        as_cells(layer_kv).index_copy_(1, step.slots, kv)
        queries: Tensor = heads[:, : config.num_heads] * config.query_scale
        return queries

    def attend(
        self, step: TorchStep, queries: Tensor, layer_kv: Tensor, window: int | None
    ) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim]."""
        return attend(queries, layer_kv, step.plans[window], self._config.attention_softcap)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up, [rows, width]."""
        gates, up = gate_up.chunk(2, dim=-1)
        return self._gate(gates) * up


_GATES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu": partial(functional.gelu, approximate="tanh"),
}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of the last dimension times a float32 weight, rounded once."""
    return (functional.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight).to(x.dtype)


def _rotations(tables: RotaryTables, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (table[positions] for table in tables)
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x, [rows, heads, width]: x * cos + swap_halves(x) * signed sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), -1) * sin
