"""The decoder: a parameterised Llama-type transformer over a ragged batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.kv_pool import Layers
from draftgate.backends.engine.linear import PRODUCT_ROWS, padded_rows
from draftgate.backends.engine.mlp import LiveRows, SparseMlp
from draftgate.backends.engine.operators.choose import operators_for
from draftgate.backends.engine.packed_layers import packed_layers
from draftgate.backends.engine.quantisation.packed import embedded
from draftgate.backends.engine.taps import Tapping, Taps
from draftgate.backends.engine.weights import Weights


class Adapters(Protocol):
    """The adapters of a model, which its products add to the rows that use them."""

    def begin(self, inputs: StepInputs) -> None:
        """Set the rows of a step, before its first product."""
        ...


class Decoder:
    """Computes the logits of a step. Its only state is the KV pool, which the caller passes.

    Attributes:
        taps: receives hidden states of every step, or None.
        is_padded: whether products need padded rows.
        padded_rows: returns the number of rows of a step including padding.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_model_len: int,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self._adapters = adapters
        self.taps: Taps | None = None
        self._weights = weights
        self.device = weights.embedding.device
        self.operators = operators_for(config, weights.embedding.dtype, max_model_len, self.device)
        self._packed_layers = packed_layers(config, self.operators, weights.layers)
        self._rope_variant = config.rope.variant(max_model_len)
        self.is_padded = weights.padded
        self.padded_rows = padded_rows if self.is_padded else _unpadded
        self._embedding_scale = _rounded(config.embedding_scale, weights.embedding.dtype)

    @property
    def arithmetic(self) -> str:
        """Library and version of the operators besides torch, a part of the numerics class.

        The name also has the block types of packed weights, and the variant of a rotation that
        depends on the longest context.
        """
        products = (linear.library for layer in self._weights.layers for linear in layer.linears)
        library = next(
            filter(None, (self._weights.lm_head.library, *products)), self.operators.name
        )
        return "-".join([library, *self._weights.formats, *filter(None, [self._rope_variant])])

    def forward(self, inputs: StepInputs, kv: Layers) -> Tensor:
        """Write the step's keys and values to `kv`, and return the logits of the sampled rows.

        Returns:
            float32 [num_samples, vocab_size].
        """
        return self.sampled_logits(self.last_hidden(inputs, kv), inputs.num_samples)

    @torch.inference_mode()
    def compile_products(self) -> None:
        """Multiply each weight shape once with every possible number of rows.

        Products without padding have no kernels to compile. On a CPU the first product of another
        shape compiles its kernel. After this call, steps neither wait for kernels nor need more
        memory. The call takes about 0.1 s for each shipped model
        (idle, one thread of a Zen 4, 2026-11-21).
        """
        dtype = self._weights.embedding.dtype
        if not self.is_padded:
            return
        linears = (linear for layer in self._weights.layers for linear in layer.linears)
        different = {(linear.in_features, linear.out_features): linear for linear in linears}
        routers = [
            layer.mlp.router for layer in self._weights.layers if isinstance(layer.mlp, SparseMlp)
        ]
        for rows in PRODUCT_ROWS:
            for linear in different.values():
                linear(torch.zeros(rows, linear.in_features, dtype=dtype))
            for router in routers[:1]:
                router.float32(torch.zeros(rows, router.in_features, dtype=dtype))
            if self._weights.lm_head.library is None:  # C compiles nothing for a shape
                self.logits(torch.zeros(rows, self.config.hidden_size, dtype=dtype))

    def sampled_logits(self, hidden: Tensor, num_samples: int) -> Tensor:
        """Return the logits of the sampled rows of `last_hidden`.

        Returns:
            float32 [num_samples, vocab_size].
        """
        # Other rows follow the sampled rows. Multiply only those of them that serve as padding.
        rows = self.padded_rows(num_samples)
        return self.logits(hidden if len(hidden) == rows else hidden[:rows])[:num_samples]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows from `last_hidden`: float32 [rows, vocab_size]."""
        if not len(hidden):  # a step of prefill chunks samples no row
            return hidden.new_empty(0, self.config.vocab_size).float()
        logits = self._weights.lm_head.float32(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def last_hidden(self, inputs: StepInputs, kv: Layers) -> Tensor:
        """Write the step's keys and values to `kv`, and return the final hidden states.

        Returns:
            [sample_rows, hidden_size], for the LM head and for pooling. [0, hidden_size] if the
            step neither samples nor returns a hidden state.
        """
        ops = self.operators
        inputs = inputs.on(self.device)
        step, live_rows = ops.begin(inputs), inputs.live_rows
        if self._adapters is not None:
            self._adapters.begin(inputs)
        hidden = embedded(self._weights.embedding, inputs.token_ids)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        tapping = None if self.taps is None else self.taps.begin()
        if self._packed_layers is not None and tapping is None:
            delta: Tensor | None = self._packed_layers.run(step, hidden, kv)
        else:
            delta = self._layers(step, hidden, kv, live_rows, tapping)
        if tapping is not None:
            tapping.end(hidden, delta, inputs.slots)
        if not inputs.num_samples + inputs.num_hidden:
            return hidden[:0]
        rows = inputs.sample_rows
        last = None if delta is None else delta[rows]
        return ops.add_norm(hidden[rows], last, self._weights.final_norm)

    def _layers(
        self, step: Any, hidden: Tensor, kv: Layers, live_rows: LiveRows, tapping: Tapping | None
    ) -> Tensor | None:
        """Run the layers one operator at a time, with the arguments and result of `PackedLayers`.

        Returns:
            None for a model without layers.
        """
        ops, gate, delta = self.operators, self.operators.gate, None
        ropes = self.config.layer_ropes or (None,) * len(kv)
        layers = zip(self._weights.layers, kv, self.config.windows, ropes, strict=True)
        for layer, layer_kv, window, rope in layers:
            normed = ops.add_norm(hidden, delta, layer.input_norm)
            if tapping is not None:
                tapping.add(hidden)
            queries = ops.rotate_and_store(step, layer.qkv(normed), layer_kv, layer.qk_norm, rope)
            attended = layer.output(ops.attend(step, queries, layer_kv, window))
            if layer.output_norm is not None:
                attended = ops.add_norm(attended, None, layer.output_norm)
            normed = ops.add_norm(hidden, attended, layer.mlp_norm)
            delta = layer.mlp(normed, gate, live_rows)
            if layer.down_norm is not None:
                delta = ops.add_norm(delta, None, layer.down_norm)
        return delta


def _unpadded(rows: int) -> int:
    return rows


def _rounded(value: float | None, dtype: torch.dtype) -> float | None:
    """Return a number as rounded to the dtype, or None."""
    return None if value is None else float(torch.tensor(value, dtype=dtype))
