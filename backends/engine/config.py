"""Reads the shape of a model from `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from draftgate.backends.engine.families import FAMILIES, ExpertNames, Family
from draftgate.backends.engine.fields import UPSTREAM_HINT, Fields
from draftgate.backends.engine.quantisation.scheme import Scheme, read_scheme
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.rope_fields import read_rope, read_ropes
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

MAX_LAYERS: Final = 1 << 12
MAX_EXPERTS: Final = 1 << 16
"""Upper bound of the experts of all layers together. Kimi K2 has 23,040."""

LAYER_TYPES: Final = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of a model.

    Attributes:
        count: number of experts of a layer.
        per_row: number of experts of a row.
        width: width of an expert, as `ModelConfig.intermediate_size`.
        normalised: whether the shares of a row's experts add up to 1.
        layers: the layers with experts. Other layers have one MLP.
        names: names in the checkpoint.
    """

    count: int
    per_row: int
    width: int
    normalised: bool
    layers: frozenset[int]
    names: ExpertNames


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
        fused_products: whether the checkpoint stores queries, keys and values as one matrix, and
            gate and up as another one.
        layer_ropes: the rotation of each layer if they differ, otherwise empty. `rope` is then that
            of layers without a window.
        activation: function of the gate, `silu` or `gelu` (its approximation by tanh).
        unit_norms: whether the checkpoint stores the weights of norms less 1.
        sandwich_norms: whether norms also follow the attention and the MLP.
        embedding_scale: factor on embeddings, rounded to their dtype.
        query_scalar: the dimension whose root divides the queries, instead of `head_dim`.
        attention_softcap: bound on the scores of attention, or None.
        logit_softcap: bound on the logits, or None.
        experts: the mixture of experts, or None.
        quantisation: the format of quantised weights, or None.
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
    fused_products: bool = False
    layer_ropes: tuple[Rope, ...] = ()
    activation: str = "silu"
    unit_norms: bool = False
    sandwich_norms: bool = False
    embedding_scale: float | None = None
    query_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    quantisation: Scheme | None = None

    @property
    def query_scale(self) -> float:
        """The factor on queries before their products with keys."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

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
    eos_ids = _eos_ids(path) | _eos_ids(directory / "generation_config.json")
    return parse_model_config(read_json(path), path, eos_ids)


def parse_model_config(
    raw: Mapping[str, Any], path: Path, eos_ids: frozenset[int] = frozenset()
) -> ModelConfig:
    """Return the shape of a model after checking the content of its `config.json` at `path`.

    Raises:
        CheckpointError: as for `read_model_config`.
    """
    fields = Fields(raw, str(path))
    family, quantisation = _family(fields), read_scheme(fields)
    if family.text_section:
        fields = fields.section("text_config")
    _check_features(fields, family)
    model = _parse(fields.with_defaults(family.defaults), family, eos_ids)
    return replace(model, quantisation=quantisation)


def _family(fields: Fields) -> Family:
    architectures = fields.get("architectures") or ["(none named)"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.error(
            "architectures",
            f"{reprlib.repr(name)} is not supported; "
            f"supported: {', '.join(FAMILIES)}; {UPSTREAM_HINT}",
        )
    return FAMILIES[name]


def _check_features(fields: Fields, family: Family) -> None:
    """Check the fields that select features without an alternative in the engine."""
    name = "hidden_activation" if family.gemma else "hidden_act"
    supported = "gelu_pytorch_tanh" if family.gemma else "silu"
    activation = fields.get(name) or supported
    if activation != supported:
        raise fields.error(
            name,
            f"{reprlib.repr(activation)} is not supported; supported: {supported}; {UPSTREAM_HINT}",
        )
    if family.gemma and fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", f"is not supported; {UPSTREAM_HINT}")


def _parse(fields: Fields, family: Family, eos_ids: frozenset[int]) -> ModelConfig:
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
    windows = _windows(fields, family, layers)
    layer_ropes: tuple[Rope, ...] = ()
    if family.local_rope:
        rope, local, positions = read_ropes(fields, family, head_dim)
        layer_ropes = tuple(rope if window is None else local for window in windows)
    else:
        rope, positions = read_rope(fields, family, head_dim)
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
        windows=windows,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_ids=eos_ids,
        fused_products=family.fused,
        layer_ropes=layer_ropes,
        experts=None if family.experts is None else _experts(fields, family.experts, layers),
        **(_gemma_features(fields, hidden) if family.gemma else {}),
    )


def _gemma_features(fields: Fields, hidden: int) -> dict[str, Any]:
    def softcap(name: str) -> float | None:
        return fields.number(name) if name in fields else None

    return {
        "activation": "gelu",
        "unit_norms": fields.flag("unit_norms", default=True),
        "sandwich_norms": True,
        "embedding_scale": hidden**0.5,
        "query_scalar": fields.number("query_pre_attn_scalar"),
        "attention_softcap": softcap("attn_logit_softcapping"),
        "logit_softcap": softcap("final_logit_softcapping"),
    }


def _experts(fields: Fields, names: ExpertNames, layers: int) -> ExpertsConfig:
    # transformers 5 writes the first name for all architectures.
    counts = (name for name in ("num_local_experts", "num_experts") if name in fields)
    name = next(counts, "num_experts")
    count = fields.count(name, 128)
    if count * layers > MAX_EXPERTS:
        raise fields.error(name, f"{count} is too large for {layers} layers")
    every = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error("mlp_only_layers", f"must list layers, not {reprlib.repr(dense)}")
    return ExpertsConfig(
        count=count,
        per_row=fields.count("num_experts_per_tok", maximum=count),
        width=fields.count(names.width),
        normalised=fields.flag("norm_topk_prob", default=True),
        layers=frozenset(range(every - 1, layers, every)) - frozenset(dense),
        names=names,
    )


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    flagged = family.windows == "flag"
    if family.windows == "none" or (flagged and not fields.flag("use_sliding_window")):
        return (None,) * layers
    if family.windows == "all" or flagged:
        return (fields.count("sliding_window") if "sliding_window" in fields else None,) * layers
    types = _layer_types(fields, layers)
    if family.windows == "types":
        pattern = fields.count("sliding_window_pattern")
        types = types or [LAYER_TYPES[(layer + 1) % pattern != 0] for layer in range(layers)]
        window = fields.count("sliding_window") if "sliding_attention" in types else None
        return tuple(window if kind == "sliding_attention" else None for kind in types)
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
