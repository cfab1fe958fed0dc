"""Loads the weights of a BERT-type encoder, fused and packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.encoder.config import EncoderConfig
from draftgate.backends.engine.linear import Linear

WORDS: Final = "embeddings.word_embeddings.weight"
_POSITIONS: Final = "embeddings.position_embeddings.weight"
TOKEN_TYPES: Final = "embeddings.token_type_embeddings.weight"
NORM: Final = "embeddings.LayerNorm"

_QKV: Final = ("attention.self.query", "attention.self.key", "attention.self.value")
_OUTPUT: Final = ("attention.output.dense",)
UP: Final = ("intermediate.dense",)
_DOWN: Final = ("output.dense",)
ATTENTION_NORM: Final = "attention.output.LayerNorm"
OUTPUT_NORM: Final = "output.LayerNorm"


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The weight and the bias of a layer normalisation, each [hidden_size]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """Return the normalised rows of x, [rows, hidden_size]."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """The weights of one layer. Queries, keys and values share one matrix."""

    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights of an encoder.

    Attributes:
        words: [vocab_size, hidden_size].
        positions: [num_segments * max_tokens, hidden_size], the positions of each segment. The
            embedding of the segment's token type is added.
    """

    words: Tensor
    positions: Tensor
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]


def load_encoder_weights(
    directory: Path,
    config: EncoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool,
    progress: Callable[[float], None] = lambda _share: None,
) -> EncoderWeights:
    """Load, convert, fuse and prepack the weights, layer by layer.

    Args:
        exact: whether the rows of bfloat16 products must be independent (`linear.py`).
        progress: called after each tensor with the share of bytes loaded, 0 to 1.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, or of the wrong shape or dtype.
    """
    checkpoint = Checkpoint(directory)
    prefix = "" if WORDS in checkpoint.tensors else config.prefix
    total = checkpoint.require({prefix + k: v for k, v in encoder_shapes(config).items()})
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done / total)

    def read(*names: str) -> Tensor:
        with TensorReader(checkpoint, dtype, count) as reader:
            return reader.read([prefix + name for name in names]).to(device)

    def linear(layer: str, modules: tuple[str, ...]) -> Linear:
        weight = read(*(f"{layer}{module}.weight" for module in modules))
        bias = read(*(f"{layer}{module}.bias" for module in modules))
        return Linear(weight, bias, exact=exact)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(read(f"{name}.weight"), read(f"{name}.bias"))

    def layer(index: int) -> EncoderLayer:
        at = f"encoder.layer.{index}."
        return EncoderLayer(
            linear(at, _QKV),
            linear(at, _OUTPUT),
            norm(at + ATTENTION_NORM),
            linear(at, UP),
            linear(at, _DOWN),
            norm(at + OUTPUT_NORM),
        )

    token_types = read(TOKEN_TYPES)[: config.num_segments, None]
    positions = (token_types + read(_POSITIONS)[config.first_position :]).flatten(0, 1)
    layers = tuple(map(layer, range(config.num_layers)))
    return EncoderWeights(read(WORDS), positions, norm(NORM), layers)


def encoder_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of an encoder, without a prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        WORDS: (config.vocab_size, hidden),
        _POSITIONS: (config.num_positions, hidden),
        TOKEN_TYPES: (config.num_token_types, hidden),
    }
    norms = [NORM]
    for index in range(config.num_layers):
        at = f"encoder.layer.{index}."
        sizes = [(module, hidden, hidden) for module in (*_QKV, *_OUTPUT)]
        sizes += [(UP[0], inner, hidden), (_DOWN[0], hidden, inner)]
        for module, outputs, inputs in sizes:
            shapes[f"{at}{module}.weight"] = (outputs, inputs)
            shapes[f"{at}{module}.bias"] = (outputs,)
        norms += [at + ATTENTION_NORM, at + OUTPUT_NORM]
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes
