"""The encoder: a BERT-type transformer over the packed tokens of several texts.

The bits of a text's states do not depend on the other texts of a step. The products have
independent rows (`linear.py`), and so has the layer normalisation. Attention and activation run for
each text alone, because their kernels split and vectorise by the whole shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.encoder.config import EncoderConfig
from draftgate.backends.engine.encoder.weights import EncoderLayer, EncoderWeights
from draftgate.backends.engine.linear import padded_rows

TANH: Final = "tanh"

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate=TANH),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate=TANH),
    "relu": functional.relu,
}
"""The activations by their names in `config.json`."""


class Encoder:
    """Computes the hidden states of whole texts. It has no state."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._activation = _ACTIVATIONS[config.activation]
        self.device = weights.words.device

    def hidden(
        self, texts: Sequence[Sequence[int]], second_segments: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Return the last hidden states of each text.

        Args:
            texts: token ids, each 1 to `max_tokens` long.
            second_segments: for each text, the index at which its second segment begins, or 0 for
                a single segment. Empty if all texts have a single one.

        Returns:
            One tensor [tokens, hidden_size] for each text.
        """
        weights, eps = self._weights, self.config.layer_norm_eps
        lengths = [len(text) for text in texts]
        tokens = sum(lengths)
        # Few rows take another kernel, so products get padding as in the decoder.
        padding = [0] * (padded_rows(tokens) - tokens)
        lengths += [len(padding)] * bool(padding)
        starts = [*(second_segments or [0] * len(texts)), 0]
        ids = torch.tensor([*chain.from_iterable(texts), *padding], device=self.device)
        places = torch.cat(list(map(self._places, lengths, starts)))
        embedded = functional.embedding(ids, weights.words) + weights.positions[places]
        hidden = weights.norm(embedded, eps)
        for layer in weights.layers:
            attended = self._attend(layer.qkv(hidden), lengths)
            hidden = layer.attention_norm(layer.output(attended) + hidden, eps)
            hidden = layer.output_norm(self._mlp(layer, hidden, lengths) + hidden, eps)
        states: tuple[Tensor, ...] = hidden.split(lengths)
        return states[: len(texts)]

    def _places(self, length: int, second_segment: int) -> Tensor:
        """Return the rows of a text in the table of positions: [length]."""
        places = torch.arange(length, device=self.device)
        if second_segment and self.config.num_segments > 1:
            places[second_segment:] += self.config.max_tokens
        return places

    def _attend(self, fused: Tensor, lengths: list[int]) -> Tensor:
        """Return the attention of each text to itself: [rows, hidden_size]."""
        config = self.config
        shape = (3, config.num_heads, config.head_dim)
        attended = []
        for part in fused.split(lengths):
            # [3, 1, heads, tokens, head_dim]
            queries, keys, values = part.view(-1, *shape).permute(1, 2, 0, 3).unsqueeze(1)
            found = functional.scaled_dot_product_attention(queries, keys, values)
            attended.append(found[0].transpose(0, 1).reshape(len(part), config.hidden_size))
        return torch.cat(attended)

    def _mlp(self, layer: EncoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
        inner = layer.up(hidden).split(lengths)
        return layer.down(torch.cat([self._activation(part) for part in inner]))
