"""Reads the shape of a BERT-type encoder from `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftgate.backends.engine.config import MAX_LAYERS
from draftgate.backends.engine.fields import Fields
from draftgate.backends.tokenizer import read_json

BERT: Final = "bert"
MODEL_TYPES: Final = (BERT, "roberta", "xlm-roberta")
_ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder.

    Attributes:
        head_dim: width of one attention head.
        num_segments: token types that texts use: BERT marks the second text of a pair, and RoBERTa
            does not.
        first_position: index of the first token's position embedding. RoBERTa's table begins with
            the positions of padding.
        activation: one of `_ACTIVATIONS`.
        prefix: what the names of its tensors begin with in checkpoints that have a head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_positions: int
    num_token_types: int
    num_segments: int
    first_position: int
    layer_norm_eps: float
    activation: str
    prefix: str

    @property
    def max_tokens(self) -> int:
        """The longest text in tokens, including special tokens."""
        return self.num_positions - self.first_position


def is_encoder(directory: Path) -> bool:
    """Return whether a checkpoint is an encoder, according to its `config.json`.

    A missing file means a decoder, whose loader names the file in its error.

    Raises:
        CheckpointError: the file is damaged.
    """
    return read_json(directory / "config.json", missing={}).get("model_type") in MODEL_TYPES


def read_encoder_config(directory: Path) -> EncoderConfig:
    """Return the shape of an encoder after checking its `config.json`.

    Raises:
        CheckpointError: a field is missing or invalid, or the engine does not support the model.
            The message names the file and the field.
    """
    path = directory / "config.json"
    fields = Fields(read_json(path), str(path))
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise fields.error("model_type", f"{reprlib.repr(kind)} is no encoder; known: {known}")
    _require_encoder(fields)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.error("num_attention_heads", f"must divide hidden_size {hidden}, not {heads}")
    positions = fields.count("max_position_embeddings")
    first = 0 if kind == BERT else fields.count("pad_token_id", 1, minimum=0) + 1
    if first >= positions:
        raise fields.error("max_position_embeddings", f"must exceed {first}, not {positions}")
    token_types = fields.count("type_vocab_size", 2)
    return EncoderConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        head_dim=hidden // heads,
        num_positions=positions,
        num_token_types=token_types,
        num_segments=min(token_types, 2) if kind == BERT else 1,
        first_position=first,
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=str(fields.get("hidden_act") or _ACTIVATIONS[0]),
        prefix="bert." if kind == BERT else "roberta.",
    )


def _require_encoder(fields: Fields) -> None:
    """Check the fields that select variants.

    Raises:
        CheckpointError: the engine does not support the variant.
    """
    activation = fields.get("hidden_act") or _ACTIVATIONS[0]
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise fields.error("hidden_act", f"{reprlib.repr(activation)} is unknown; known: {known}")
    positions = fields.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        shown = reprlib.repr(positions)
        raise fields.error("position_embedding_type", f"must be 'absolute', not {shown}")
    if fields.flag("is_decoder"):
        raise fields.error("is_decoder", "must be false, because an encoder has no causal mask")
