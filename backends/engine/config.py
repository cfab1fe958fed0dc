"""Reads the shape of a model from `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from draftgate.backends.engine.fields import Fields
from draftgate.backends.engine.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    yarn_attention_factor,
)
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

MAX_LAYERS: Final = 1 << 12
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
LAYER_TYPES: Final = ("full_attention", "sliding_attention")
UPSTREAM_HINT: Final = (
    "to serve the model with vLLM or SGLang, use `--backend openai --upstream URL`"
)


@dataclass(frozen=True, slots=True)
class _Family:
    """The features of an architecture, and the defaults of its config.

    Attributes:
        biases: whether queries, keys and values have a bias, and whether the attention output has
            one. None if `attention_bias` sets both.
        mlp_bias: whether `mlp_bias` may be set.
        qk_norm: whether each head normalises its queries and keys.
        windows: `all` if `sliding_window` applies to all layers, `some` if the Qwen fields select
            the layers, or `none`.
        defaults: values of absent fields, as in `transformers`. A null field is not absent.
    """

    biases: tuple[bool, bool] | None
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: str = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS: Final = MappingProxyType(
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
)

FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(
            biases=None, mlp_bias=True, defaults={"max_position_embeddings": 2048}
        ),
        "MistralForCausalLM": _Family(
            biases=(False, False),
            windows="all",
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
        ),
        "Qwen2ForCausalLM": _Family(biases=(True, False), windows="some", defaults=_QWEN_DEFAULTS),
        "Qwen3ForCausalLM": _Family(
            biases=None, qk_norm=True, windows="some", defaults={**_QWEN_DEFAULTS, "head_dim": 128}
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder.

    Attributes:
        head_dim: width of one attention head, which can differ from `hidden_size / num_heads`.
        num_kv_heads: key and value heads. Each serves `num_heads / num_kv_heads` query heads.
        max_position_embeddings: the longest context in tokens, including its extension by YaRN.
        windows: for each layer, the number of tokens that a token attends to, itself included.
            None means all tokens.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        output_bias: whether the projection of the attention's output has a bias.
        mlp_bias: whether all products of the MLP have a bias.
        qk_norm: whether each head normalises its queries and keys before their rotation.
        tied_embeddings: whether the LM head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_ids: frozenset[int]

    @property
    def query_group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def known_eos_ids(self) -> frozenset[int]:
        """End tokens that are in the vocabulary. Some checkpoints also list unknown tokens."""
        return frozenset(token for token in self.eos_ids if 0 <= token < self.vocab_size)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the number of bytes of one token's keys and values in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """Return the shape of a model after checking its `config.json`.

    Raises:
        CheckpointError: the directory or a field is missing or invalid, or the engine does not
            support the model. The message names the file and the field.
    """
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint: {directory} is not a directory")
    path = directory / "config.json"
    raw = read_json(path)
    family = _family(Fields(raw, str(path)))
    fields = Fields({**family.defaults, **raw}, str(path))
    eos_ids = _eos_ids(path) | _eos_ids(directory / "generation_config.json")
    return _parse(fields, family, eos_ids)


def _family(fields: Fields) -> _Family:
    architectures = fields.get("architectures") or ["(none named)"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.error(
            "architectures",
            f"{reprlib.repr(name)} is not supported; "
            f"supported: {', '.join(FAMILIES)}; {UPSTREAM_HINT}",
        )
    if "quantization_config" in fields:
        method = fields.section("quantization_config").get("quant_method") or "unnamed"
        raise fields.error(
            "quantization_config",
            f"({reprlib.repr(method)}) is not supported; "
            f"supported: weights in bfloat16, float16 or float32; {UPSTREAM_HINT}",
        )
    activation = fields.get("hidden_act") or "silu"
    if activation != "silu":
        raise fields.error(
            "hidden_act",
            f"{reprlib.repr(activation)} is not supported; supported: silu; {UPSTREAM_HINT}",
        )
    return FAMILIES[name]


def _parse(fields: Fields, family: _Family, eos_ids: frozenset[int]) -> ModelConfig:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_attention_heads", f"{heads} is not a multiple of num_key_value_heads, {kv_heads}"
        )
    head_dim = fields.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    if "head_dim" not in fields and hidden % heads:
        raise fields.error(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads, {heads}"
        )
    layers = fields.count("num_hidden_layers", maximum=MAX_LAYERS)
    rope, positions = _rope(fields)
    attention_bias = family.biases is None and fields.flag("attention_bias")
    qkv_bias, output_bias = family.biases or (attention_bias, attention_bias)
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=positions,
        windows=_windows(fields, family, layers),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_ids=eos_ids,
    )


def _windows(fields: Fields, family: _Family, layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "all":
        return (fields.count("sliding_window") if "sliding_window" in fields else None,) * layers
    types = _layer_types(fields, layers)
    if not (fields.flag("use_sliding_window") and "sliding_window" in fields):
        if "sliding_attention" in types:
            raise fields.error("layer_types", "has sliding layers, but no sliding window is in use")
        return (None,) * layers
    window = fields.count("sliding_window")
    if not types:
        full = fields.count("max_window_layers", minimum=0)
        return tuple(None if layer < full else window for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _layer_types(fields: Fields, layers: int) -> list[str]:
    """Return the attention type of each layer, or an empty list if the config has none."""
    if "layer_types" not in fields:
        return []
    types = fields.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", f"must list a type for each of the {layers} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise fields.error(
                "layer_types",
                f"{reprlib.repr(kind)} is not supported; "
                f"supported: {', '.join(LAYER_TYPES)}; {UPSTREAM_HINT}",
            )
    return types


def _rope(fields: Fields) -> tuple[Rope, int]:
    """Return the rotation and the longest context.

    Newer checkpoints have the settings in `rope_parameters`, older ones in `rope_scaling` and
    `rope_theta`.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    settings = fields.section(name)
    theta = settings.number(
        "rope_theta", fields.number("rope_theta", 10000.0, above=1.0), above=1.0
    )
    for holder in (fields, settings):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", f"is not supported; {UPSTREAM_HINT}")
    if settings.nested:
        raise fields.error(name, f"that differ between layers are not supported; {UPSTREAM_HINT}")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise settings.error(
            "rope_type",
            f"{reprlib.repr(kind)} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}; {UPSTREAM_HINT}",
        )
    positions = fields.count("max_position_embeddings")
    if kind == "default":
        return Rope(theta), positions
    if kind == "linear":
        return Rope(theta, LinearScaling(settings.number("factor"))), positions
    # The top-level field takes precedence if a checkpoint has both, as in transformers.
    holder = fields if "original_max_position_embeddings" in fields else settings
    original = holder.count("original_max_position_embeddings", positions)
    if kind == "llama3":
        return Rope(theta, _llama3(settings, original)), positions
    yarn = _yarn(settings, original, positions)
    # The field of some published YaRN checkpoints holds the context before its extension.
    return Rope(theta, yarn), max(positions, int(original * yarn.factor))


def _llama3(settings: Fields, original: int) -> Llama3Scaling:
    low = settings.number("low_freq_factor")
    high = settings.number("high_freq_factor", above=low)
    return Llama3Scaling(settings.number("factor"), low, high, original)


def _yarn(settings: Fields, original: int, positions: int) -> YarnScaling:
    factor = settings.number("factor", positions / original)
    mscale = [
        settings.number(name) if name in settings else None for name in ("mscale", "mscale_all_dim")
    ]
    return YarnScaling(
        factor=factor,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=settings.number(
            "attention_factor", yarn_attention_factor(factor, *mscale)
        ),
        truncate=settings.flag("truncate", default=True),
        original_positions=original,
    )


def _eos_ids(path: Path) -> frozenset[int]:
    """Return the end tokens in a file.

    `generation_config.json` may list more tokens than `config.json`.

    Raises:
        CheckpointError: `eos_token_id` holds something other than token ids.
    """
    value = read_json(path, missing={}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id must be a token id or a list of token ids, not {value!r}"
        )
    return frozenset(ids)
