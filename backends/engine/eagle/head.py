"""The forward pass of an EAGLE-3 head.

Source: Li, Wei, Zhang, Zhang, "EAGLE-3" (arXiv 2503.01840).

Row p of a sequence reads the token at position p + 1 and the feature of the token at position p,
which together predict the token at position p + 2. For drafts, the target has no feature yet, and
the head's own hidden state takes its place.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.eagle.config import HeadConfig
from draftgate.backends.engine.eagle.weights import HeadWeights
from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.kv_pool import Features, Layers
from draftgate.backends.engine.linear import PRODUCT_ROWS
from draftgate.backends.engine.operators.choose import operators_for
from draftgate.backends.engine.quantisation.packed import embedded

NO_LOGIT: Final = -1e30
"""Logit of tokens that the head cannot draft.

The number is finite, so that a grammar that allows none of the head's tokens leaves a distribution.
"""


class HeadOutput(NamedTuple):
    """The sampled rows of a pass.

    Attributes:
        hidden: the hidden states before the last norm, [rows, hidden_size].
        logits: float32 [rows, vocab_size of the target].
    """

    hidden: Tensor
    logits: Tensor


class EagleHead:
    """Computes features of the target's hidden states, and drafts from them."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, max_model_len: int) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.checkpoint_hash = weights.checkpoint_hash
        self._weights = weights
        self._operators = operators_for(config.model, self.dtype, max_model_len, self.device)

    @property
    def features(self) -> Features:
        """The features that the head reads."""
        return Features(self.config.model.hidden_size, self.dtype)

    def fuse(self, tapped: Tensor) -> Tensor:
        """Return the features of tapped states, [rows, taps x width of the target]."""
        return self._weights.fuse(tapped)

    @torch.inference_mode()
    def compile_products(self) -> None:
        """Multiply each weight with every possible number of rows (`Decoder.compile_products`)."""
        linears = (self._weights.fuse, *self._weights.layer.linears, self._weights.lm_head)
        for rows in PRODUCT_ROWS:
            for linear in linears:
                linear(torch.zeros(rows, linear.in_features, dtype=self.dtype))

    def forward(self, inputs: StepInputs, features: Tensor, kv: Layers) -> HeadOutput:
        """Write the rows' keys and values to `kv`, and return the sampled rows.

        Args:
            inputs: the rows, on the head's device.
            features: a feature or hidden state for each row, [rows, hidden_size], contiguous.
            kv: keys and values of the head's layer.
        """
        ops, weights, layer = self._operators, self._weights, self._weights.layer
        step = ops.begin(inputs)
        tokens = embedded(weights.embedding, inputs.token_ids)
        normed = ops.add_norm(features, None, weights.hidden_norm)
        hidden = normed.clone() if self.config.norm_before_residual else features
        pairs = torch.cat([ops.add_norm(tokens, None, layer.input_norm), normed], 1)
        (layer_kv,), (window,) = kv, self.config.model.windows
        queries = ops.rotate_and_store(step, layer.qkv(pairs), layer_kv, layer.qk_norm)
        if not inputs.num_samples:  # later rows read only keys and values of these rows
            return HeadOutput(hidden[:0], self._logits(hidden[:0]))
        rows = inputs.sample_rows
        attended = layer.output(ops.attend(step, queries, layer_kv, window)[rows])
        hidden = hidden[rows]
        delta = layer.mlp(ops.add_norm(hidden, attended, layer.mlp_norm), ops.gate, len(rows))
        last = ops.add_norm(hidden, delta, weights.final_norm)
        return HeadOutput(hidden[: inputs.num_samples], self._logits(last)[: inputs.num_samples])

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in the target's vocabulary: float32 [rows, vocab_size]."""
        vocab_size = self.config.model.vocab_size
        logits = hidden.new_full((len(hidden), vocab_size), NO_LOGIT, dtype=torch.float32)
        if len(hidden):
            logits[:, self._weights.token_ids] = self._weights.lm_head.float32(hidden)
        return logits
