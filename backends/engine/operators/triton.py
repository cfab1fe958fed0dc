"""Operators for GPUs: the Triton kernels of `engine/kernels`, each defined by its torch reference.

The bits of a row do not depend on the other rows, as the docstrings of the kernels explain. torch
computes the matrix products (`linear.py`). The kernels return nothing to the host, so that a graph
can capture a step and replay it with other contents of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import RaggedSpans, StepInputs
from draftgate.backends.engine.kernels.attention_work import plan_work
from draftgate.backends.engine.kernels.attention_work_ref import AttentionWork
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import DraftTrees
from draftgate.backends.engine.kernels.rms_norm import add_rms_norm, rms_norm
from draftgate.backends.engine.kernels.rope_kv import rope_kv
from draftgate.backends.engine.kernels.swiglu import geglu, swiglu
from draftgate.backends.engine.operators.base import RotaryTables, rotary_tables
from draftgate.backends.engine.operators.ragged import ragged_spans
from draftgate.backends.engine.rope import Rope

_GATES: Final = {"silu": swiglu, "gelu": geglu}


class TritonStep(NamedTuple):
    """The positions and slots of a step's rows, its attention spans, and work lists by window."""

    positions: Tensor
    slots: Tensor
    ragged: RaggedSpans
    work: dict[int | None, AttentionWork]


class TritonOperators:
    """Implements `Operators`.

    All tensors are on one GPU, or on the CPU for Triton's interpreter.
    """

    def __init__(self, config: ModelConfig, tables: Mapping[Rope, RotaryTables]) -> None:
        self.name = f"triton-{triton.__version__}"
        self._config = config
        self._tables = tables
        self._own_tables = tables[config.rope]

    def begin(self, inputs: StepInputs) -> TritonStep:
        """Return the step's spans on the device. Copy spans that are still on the host."""
        ragged = inputs.ragged
        if ragged is None:
            rows = len(inputs.positions)
            ragged = ragged_spans(inputs.spans, inputs.positions.device, rows)
        return TritonStep(inputs.positions, inputs.slots, ragged, {})

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMS norm of the sum."""
        eps = self._config.rms_norm_eps
        if delta is None:
            return rms_norm(hidden, weight, eps)
        return add_rms_norm(delta, hidden, weight, eps)

    def rotate_and_store(
        self,
        step: TritonStep,
        fused: Tensor,
        layer_kv: Tensor,
        qk_norm: Tensor | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the pool."""
        config = self._config
        return rope_kv(
            fused,
            step.positions,
            step.slots,
            *(self._own_tables if rope is None else self._tables[rope]),
            layer_kv,
            qk_norm=qk_norm,
            eps=config.rms_norm_eps,
            query_scale=config.query_scale,
        )

    def attend(
        self, step: TritonStep, queries: Tensor, layer_kv: Tensor, window: int | None
    ) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim].

        Rows that do not attend are undefined. The kernel always supports trees, because a captured
        step may later have a tree. All layers with the same window share a work list.
        """
        ragged = step.ragged
        trees = DraftTrees(ragged.ancestors, ragged.draft_starts, ragged.positions)
        lengths = (ragged.query_starts, ragged.context_lens, ragged.tables)
        if window not in step.work:
            step.work[window] = plan_work(
                queries,
                layer_kv,
                *lengths,
                block_size=ragged.page_tokens,
                window=window,
                trees=trees,
            )
        attended = paged_attention(
            queries,
            layer_kv,
            *lengths,
            block_size=ragged.page_tokens,
            scale=1.0,  # because `rope_kv` scales the queries
            window=window,
            softcap=self._config.attention_softcap,
            trees=trees,
            work=step.work[window],
        )
        return attended.view(len(queries), -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up, [rows, width]."""
        return _GATES[self._config.activation](gate_up)


def triton_operators(
    config: ModelConfig, max_positions: int, device: torch.device
) -> TritonOperators:
    """Return the model's operators on Triton kernels, with rotation tables in float32."""
    return TritonOperators(config, rotary_tables(config, max_positions, torch.float32, device))
