"""The decoder: one parameterised transformer of the Llama lineage over a ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from backends.engine.attention import AttentionPlan, attend, plan_attention
from backends.engine.config import ModelConfig
from backends.engine.inputs import StepInputs
from backends.engine.kv_pool import Layers
from backends.engine.weights import LayerWeights, Weights


class Decoder:
    """Runs one step: tokens in, logits of the sampling rows out. Stateless but for the KV pool."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        """Keep the weights and tabulate the rotations of all positions."""
        self.config = config
        self._weights = weights
        self._group = config.num_heads // config.num_kv_heads
        self._cos, self._sin = config.rope.tables(
            config.head_dim, max_model_len, weights.embedding.dtype
        )

    def forward(self, inputs: StepInputs, kv: Layers) -> Tensor:
        """Write the step's keys and values to the layers of a pool and return the logits.

        Returns:
            float32 [num_samples, vocab_size].
        """
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        turn = self._turn(inputs.positions)
        plans = {
            window: plan_attention(inputs.spans, self._group, hidden.dtype, window)
            for window in set(self.config.windows)
        }
        layers = zip(self._weights.layers, kv, self.config.windows, strict=True)
        for layer, layer_kv, window in layers:
            attended = self._attend(layer, layer_kv, plans[window], hidden, inputs, turn)
            hidden = hidden + layer.output(attended)
            hidden = hidden + self._mlp(layer, hidden)
        if not inputs.num_samples:  # prefill chunks alone
            return hidden.new_empty(0, self.config.vocab_size).float()
        final = self._norm(hidden[inputs.sample_rows], self._weights.final_norm)
        return self._weights.lm_head.float32(final)[: inputs.num_samples]

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions [rows], [rows, 1, head_dim] each."""
        cos, sin = self._cos[positions], self._sin[positions]
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def _attend(
        self,
        layer: LayerWeights,
        layer_kv: Tensor,
        plan: AttentionPlan,
        hidden: Tensor,
        inputs: StepInputs,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Write the layer's keys and values and return what its heads see, side by side."""
        config = self.config
        fused = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = fused.view(len(fused), -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        turned = heads[:, :rotated]
        if layer.qk_norm is not None:
            turned = functional.rms_norm(turned, (config.head_dim,), eps=config.rms_norm_eps)
            turned = turned * layer.qk_norm
        heads[:, :rotated] = _rotate(turned, *turn)
        layer_kv.index_copy_(1, inputs.slots, heads[:, config.num_heads :].transpose(0, 1))
        queries = heads[:, : config.num_heads] * config.head_dim**-0.5
        return attend(queries, layer_kv, plan)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x of [rows, heads, head_dim] in halves: x * cos + swap_halves(x) * signed sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), -1) * sin
