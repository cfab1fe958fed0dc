"""The supported architectures of GGUF files: their tensors and configs in Hugging Face layout.

The tensors of a layer have other names, llama's queries and keys are permuted, and all experts of a
layer are one tensor. `conversion/*.py` of llama.cpp writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.keys import UPSTREAM_HINT, ArchitectureKeys
from draftgate.backends.gguf.reader import GgufModel, GgufTensor
from draftgate.backends.gguf.rotation import (
    FACTORS,
    LONG_FACTORS,
    check_full_rotation,
    long_rotation,
    plain_rotation,
)

_EMBEDDING: Final = "token_embd.weight"

_GLOBAL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA: Final = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

_NAME: Final = re.compile(r"(blk\.(?P<layer>\d{1,4})\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")

_UNSUPPORTED: Final = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "expert_weights_scale",
    "expert_group_count",
    "router_logit_softcapping",
)
"""Keys of features that the engine lacks, which change the results if they are ignored."""

_MAX_EXPERTS: Final = 1 << 12
"""Upper bound of the experts of a layer. llama.cpp supports 512."""

_SOFTMAX: Final = 1
"""The number of the only supported function of a router."""

_LARGEST_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models with 27B weights, whose queries have another scale. Files do not state the
scale, and llama.cpp knows it by the number of layers."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """Where the values of a tensor of the Hugging Face layout are.

    Attributes:
        stored: the tensor of the file.
        shape: the shape of the result.
        first_row: the first of its rows in the file.
        permuted_heads: heads whose rows the file permutes, or None. In each head, row 2j of the
            file is row j, and row 2j + 1 is row j + half of the head.
    """

    stored: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    permuted_heads: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows. A vector has rows of one value."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.stored.kind.row_bytes(self.shape[1] if len(self.shape) > 1 else 1)

    @property
    def offset(self) -> int:
        """Position of the first byte in the file."""
        return self.stored.offset + self.first_row * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Experts:
    """Names of a mixture of experts: of the block in a layer, and of the parts of an expert."""

    block: str
    parts: Mapping[str, str]


_QWEN_EXPERTS: Final = _Experts(
    "mlp", {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
)
_MIXTRAL_EXPERTS: Final = _Experts(
    "block_sparse_moe", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """An architecture.

    Attributes:
        name: its name in a `config.json`.
        layer: names of the modules of a layer, by their names in the file.
        settings: returns the fields of the config that only this architecture has.
        permuted: whether the rows of queries and keys are permuted.
        experts: names of its mixture of experts, or None.
    """

    name: str
    layer: Mapping[str, str]
    settings: Callable[[ArchitectureKeys], dict[str, Any]]
    permuted: bool = False
    experts: _Experts | None = None


def config_fields(model: GgufModel) -> dict[str, Any]:
    """Return the `config.json` of a model in Hugging Face layout.

    Raises:
        CheckpointError: the engine does not support the model. The message names the file and the
            key.
    """
    keys, architecture = ArchitectureKeys(model), _architecture(model)
    for name in _UNSUPPORTED:
        if name in keys:
            raise keys.error(name, f"is not supported; {UPSTREAM_HINT}")
    if keys.count("attention.causal", 1) != 1:
        raise keys.error("attention.causal", f"must be true; {UPSTREAM_HINT}")
    vocab_size = _vocab_size(model, keys)
    return {
        "architectures": [architecture.name],
        "vocab_size": vocab_size,
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", keys.heads),
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in model.tensors,
        **architecture.settings(keys),
    }


def source_tensors(model: GgufModel) -> dict[str, SourceTensor]:
    """Return where the tensors of a model are, by their names in Hugging Face layout.

    Raises:
        CheckpointError: the file has a tensor that its architecture does not have, so that a result
            without the tensor would be wrong.
    """
    architecture = _architecture(model)
    found: dict[str, SourceTensor] = {}
    for name, stored in model.tensors.items():
        if name not in FACTORS:
            found |= dict(_sources(model, architecture, name, stored))
    return found


def _architecture(model: GgufModel) -> _Architecture:
    name = model.metadata.text("general.architecture")
    if name == "llama" and model.metadata.count("llama.expert_count", 0):
        return _MIXTRAL
    if name not in _ARCHITECTURES:
        raise model.metadata.error(
            "general.architecture",
            f"{name} is not supported; supported: {', '.join(_ARCHITECTURES)}; {UPSTREAM_HINT}",
        )
    return _ARCHITECTURES[name]


def _vocab_size(model: GgufModel, keys: ArchitectureKeys) -> int:
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{model.path}: tensor {_EMBEDDING} is missing")
    rows, tokens = embedding.shape[0], len(keys.metadata.texts("tokenizer.ggml.tokens"))
    if rows != tokens:
        raise CheckpointError(
            f"{model.path}: the vocabulary has {tokens} tokens, but {_EMBEDDING} has {rows} rows; "
            "convert the model again with its own tokenizer"
        )
    return rows


def _sources(
    model: GgufModel, architecture: _Architecture, name: str, stored: GgufTensor
) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the tensors that a tensor of the file holds."""
    parsed = _NAME.fullmatch(name)
    module, experts = parsed["module"] if parsed else "", architecture.experts
    names = _GLOBAL if parsed is None or parsed["layer"] is None else architecture.layer
    prefix = "" if parsed is None or parsed["layer"] is None else f"model.layers.{parsed['layer']}."
    kind = parsed["kind"] if parsed else ""
    if prefix and experts is not None and module in experts.parts and len(stored.shape) == 3:
        count, rows, columns = stored.shape
        # Otherwise, the tiny experts of a hostile file would become millions of tensors.
        stated = ArchitectureKeys(model).count("expert_count")
        if count != stated or count > _MAX_EXPERTS:
            least = min(stated, _MAX_EXPERTS)
            raise CheckpointError(f"{model.path}: {name} has {count} experts, not {least}")
        part = f"{experts.parts[module]}.{kind}"
        for expert in range(count):
            source = SourceTensor(stored, (rows, columns), expert * rows)
            yield f"{prefix}{experts.block}.experts.{expert}.{part}", source
    elif prefix and experts is not None and module == "ffn_gate_inp" and _is_plain(stored):
        yield f"{prefix}{experts.block}.gate.{kind}", SourceTensor(stored, stored.shape)
    elif module in names and _is_plain(stored):
        heads = _permuted_heads(model, architecture, module, stored)
        source = SourceTensor(stored, stored.shape, permuted_heads=heads)
        yield f"{prefix}{names[module]}.{kind}", source
    else:
        raise CheckpointError(
            f"{model.path}: tensor {name} of shape {stored.shape} in {stored.kind.name} is not "
            f"supported for {architecture.name}; {UPSTREAM_HINT}"
        )


def _is_plain(stored: GgufTensor) -> bool:
    """Return whether a tensor is a matrix, or a vector that is not quantised."""
    return len(stored.shape) == 2 or (len(stored.shape) == 1 and stored.kind.values == 1)


def _permuted_heads(
    model: GgufModel, architecture: _Architecture, module: str, stored: GgufTensor
) -> int | None:
    if not architecture.permuted or module not in {"attn_q", "attn_k"}:
        return None
    keys = ArchitectureKeys(model)
    heads = keys.heads
    heads = heads if module == "attn_q" else keys.count("attention.head_count_kv", heads)
    if heads < 1 or stored.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{model.path}: {module} cannot have {stored.shape[0]} rows for {heads} heads"
        )
    return heads


def _plain(keys: ArchitectureKeys) -> dict[str, Any]:
    check_full_rotation(keys)
    return {"rope_parameters": plain_rotation(keys)}


def _experts(keys: ArchitectureKeys) -> dict[str, Any]:
    function = keys.count("expert_gating_func", _SOFTMAX)
    if function not in {0, _SOFTMAX}:
        raise keys.error("expert_gating_func", f"{function} is not supported; {UPSTREAM_HINT}")
    if keys.count("expert_shared_count", 0):
        raise keys.error("expert_shared_count", f"is not supported; {UPSTREAM_HINT}")
    return {
        **_plain(keys),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def _mixtral(keys: ArchitectureKeys) -> dict[str, Any]:
    # Its window is not in the file.
    experts = _experts(keys)
    return {**experts, "num_local_experts": experts["num_experts"], "sliding_window": None}


def _qwen_experts(keys: ArchitectureKeys) -> dict[str, Any]:
    width = keys.count("expert_feed_forward_length", keys.count("feed_forward_length"))
    normalised = bool(keys.count("expert_weights_norm", 1))
    return {**_experts(keys), "moe_intermediate_size": width, "norm_topk_prob": normalised}


def _gemma(keys: ArchitectureKeys) -> dict[str, Any]:
    hidden, layers = keys.count("embedding_length"), keys.count("block_count")
    largest = layers == _LARGEST_GEMMAS[keys.architecture]
    return {
        # The files store the weights of norms with 1 added.
        "unit_norms": False,
        "query_pre_attn_scalar": hidden / keys.heads if largest else keys.head_dim,
        "sliding_window": keys.count("attention.sliding_window", 4096),
        **_window_pattern(keys, layers),
    }


def _window_pattern(keys: ArchitectureKeys, layers: int) -> dict[str, Any]:
    """Return which layers have a window."""
    name = "attention.sliding_window_pattern"
    if keys.metadata.is_list(keys.key(name)):
        flags = keys.metadata.integers(keys.key(name))
        if len(flags) != layers:
            raise keys.error(name, f"must list {layers} layers, not {len(flags)}")
        types = ["sliding_attention" if flag else "full_attention" for flag in flags]
        return {"layer_types": types}
    pattern = keys.count(name, 2 if keys.architecture == "gemma2" else 6)
    return {"sliding_window_pattern": pattern}


def _gemma2(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **_gemma(keys),
        **_plain(keys),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: ArchitectureKeys) -> dict[str, Any]:
    check_full_rotation(keys)
    local = keys.number("rope.freq_base_swa", 10000.0)
    cap = "final_logit_softcapping"
    return {
        **_gemma(keys),
        "rope_parameters": {
            "full_attention": plain_rotation(keys),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        **({cap: keys.number(cap)} if cap in keys else {}),
    }


def _phi3(keys: ArchitectureKeys) -> dict[str, Any]:
    tensors, dim = keys.model.tensors, keys.head_dim
    rotation = plain_rotation(keys) if LONG_FACTORS not in tensors else long_rotation(keys)
    rotated = keys.count("rope.dimension_count", dim)
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    return {
        "rope_parameters": {**rotation, "partial_rotary_factor": rotated / dim},
        "original_max_position_embeddings": original,
        # Phi-4 has none, which its files mark by 0.
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
    }


_MIXTRAL: Final = _Architecture(
    "MixtralForCausalLM", _LAYER, _mixtral, permuted=True, experts=_MIXTRAL_EXPERTS
)
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = MappingProxyType(
    {
        "llama": _Architecture("LlamaForCausalLM", _LAYER, _plain, permuted=True),
        "qwen2": _Architecture("Qwen2ForCausalLM", _LAYER, _plain),
        "qwen3": _Architecture("Qwen3ForCausalLM", {**_LAYER, **_HEAD_NORMS}, _plain),
        "qwen3moe": _Architecture(
            "Qwen3MoeForCausalLM",
            {**_LAYER, **_HEAD_NORMS},
            _qwen_experts,
            experts=_QWEN_EXPERTS,
        ),
        "gemma2": _Architecture("Gemma2ForCausalLM", {**_LAYER, **_GEMMA}, _gemma2),
        "gemma3": _Architecture("Gemma3ForCausalLM", {**_LAYER, **_GEMMA, **_HEAD_NORMS}, _gemma3),
        "phi3": _Architecture("Phi3ForCausalLM", {**_LAYER, **_PHI}, _phi3),
    }
)
"""The supported architectures by their names in files."""
