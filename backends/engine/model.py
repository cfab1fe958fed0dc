"""The decoder: one parameterised Llama-style transformer over a ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from backends.engine.attention import attend
from backends.engine.config import ModelConfig
from backends.engine.inputs import StepInputs
from backends.engine.kv_pool import KvPool
from backends.engine.weights import LayerWeights, Weights


class Decoder:
    """Runs one step: tokens in, logits of the sampling rows out. Stateless but for the KV pool."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        """Keep the weights and tabulate the rotations of all positions."""
        self.config = config
        self._weights = weights
        self._cos, self._sin = _rotations(config, max_model_len, weights.embedding.dtype)

    def forward(self, inputs: StepInputs, pool: KvPool) -> Tensor:
        """Write the step's keys and values to the pool and return the logits.

        Returns:
            float32 [num_samples, vocab_size].
        """
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        cos = self._cos[inputs.positions][:, None]
        sin = self._sin[inputs.positions][:, None]
        for layer, layer_kv in zip(self._weights.layers, pool.layers, strict=True):
            hidden = hidden + self._attention(layer, layer_kv, hidden, inputs, cos, sin)
            hidden = hidden + self._mlp(layer, hidden)
        if not inputs.num_samples:  # prefill chunks alone
            return hidden.new_empty(0, self.config.vocab_size).float()
        final = self._norm(hidden[inputs.sample_rows], self._weights.final_norm)
        return self._weights.lm_head(final)[: inputs.num_samples].float()

    def _attention(
        self,
        layer: LayerWeights,
        layer_kv: Tensor,
        hidden: Tensor,
        inputs: StepInputs,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        config = self.config
        fused = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = fused.view(len(fused), -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        heads[:, :rotated] = _rotate(heads[:, :rotated], cos, sin)
        layer_kv.index_copy_(1, inputs.slots, heads[:, config.num_heads :].transpose(0, 1))
        queries = heads[:, : config.num_heads] * config.head_dim**-0.5
        return layer.output(attend(queries, layer_kv, inputs.spans))

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _rotations(
    config: ModelConfig, max_model_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of all positions, [max_model_len, head_dim] each.

    RoPE (arXiv 2104.09864) in the half-split form: x * cos + swap_halves(x) * sin, with the first
    half of sin negated.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(max_model_len).float(), config.rope_theta**-exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x of [rows, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), -1) * sin
