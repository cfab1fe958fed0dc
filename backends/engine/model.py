"""The decoder: one parameterised transformer of the Llama lineage over a ragged batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from backends.engine.config import ModelConfig
from backends.engine.inputs import StepInputs
from backends.engine.kv_pool import Layers
from backends.engine.operators.choose import operators_for
from backends.engine.weights import Weights


class Decoder:
    """Runs one step: tokens in, logits of the sampling rows out. Stateless but for the KV pool."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        """Keep the weights, tabulate the rotations of all positions, choose the operators."""
        self.config = config
        self._weights = weights
        self.operators = operators_for(config, weights.embedding.dtype, max_model_len)

    def forward(self, inputs: StepInputs, kv: Layers) -> Tensor:
        """Write the step's keys and values to the layers of a pool and return the logits.

        Returns:
            float32 [num_samples, vocab_size].
        """
        does = self.operators
        step = does.begin(inputs)
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        delta = None
        layers = zip(self._weights.layers, kv, self.config.windows, strict=True)
        for layer, layer_kv, window in layers:
            fused = layer.qkv(does.add_norm(hidden, delta, layer.input_norm))
            queries = does.turn_and_store(step, fused, layer_kv, layer.qk_norm)
            attended = layer.output(does.attend(step, queries, layer_kv, window))
            gate_up = layer.gate_up(does.add_norm(hidden, attended, layer.mlp_norm))
            delta = layer.down(does.gate(gate_up))
        if not inputs.num_samples:  # prefill chunks alone
            return hidden.new_empty(0, self.config.vocab_size).float()
        rows = inputs.sample_rows
        last = None if delta is None else delta[rows]
        final = does.add_norm(hidden[rows], last, self._weights.final_norm)
        return does.logits(final, self._weights.lm_head)[: inputs.num_samples]
