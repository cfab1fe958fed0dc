"""The supported architectures, as features of one parameterised decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple


class ExpertNames(NamedTuple):
    """Names of the parts of a mixture of experts in a checkpoint.

    Attributes:
        block: name of the mixture in a layer.
        gate, up, down: names of the matrices of an expert.
        width: config field of the width of an expert.
    """

    block: str
    gate: str
    up: str
    down: str
    width: str


@dataclass(frozen=True, slots=True)
class Family:
    """The features of an architecture, and the defaults of its config.

    Attributes:
        biases: whether queries, keys and values have a bias, and whether the attention output has
            one. None if `attention_bias` sets both.
        mlp_bias: whether `mlp_bias` may be set.
        qk_norm: whether each head normalises its queries and keys.
        fused: whether the checkpoint stores queries, keys and values as one matrix, and gate and up
            as another one.
        partial_rotation: whether `partial_rotary_factor` may be set.
        rope_types: other names of rotations in the configs of this architecture.
        windows: `all` if `sliding_window` applies to all layers, `some` if the Qwen fields select
            the layers, `types` if `layer_types` does, `flag` if `use_sliding_window` sets the
            window of all layers, or `none`.
        gemma: whether the model has the norms, embedding scale, activation, query scale and soft
            caps of Gemma 2.
        local_rope: whether layers with a window have a rotation of their own.
        experts: names of the parts of a mixture of experts, or None for models without one.
        text_section: whether the config has the decoder's fields in `text_config`, beside those of
            other parts.
        defaults: values of absent fields, as in `transformers`. A null field is not absent.
    """

    biases: tuple[bool, bool] | None
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    partial_rotation: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    windows: str = "none"
    gemma: bool = False
    local_rope: bool = False
    experts: ExpertNames | None = None
    text_section: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS: Final = MappingProxyType(
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
)

_GEMMA_DEFAULTS: Final = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)
_GEMMA3: Final = Family(
    biases=None,
    qk_norm=True,
    windows="types",
    gemma=True,
    local_rope=True,
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "Gemma2ForCausalLM": Family(
            biases=None,
            windows="types",
            gemma=True,
            defaults={
                **_GEMMA_DEFAULTS,
                "vocab_size": 256000,
                "max_position_embeddings": 8192,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_section=True),
        "LlamaForCausalLM": Family(
            biases=None, mlp_bias=True, defaults={"max_position_embeddings": 2048}
        ),
        "MistralForCausalLM": Family(
            biases=(False, False),
            windows="all",
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
        ),
        "MixtralForCausalLM": Family(
            biases=(False, False),
            windows="all",
            experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size"),
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "num_experts_per_tok": 2,
                "num_local_experts": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
            },
        ),
        "Phi3ForCausalLM": Family(
            biases=(False, False),
            fused=True,
            partial_rotation=True,
            rope_types={"su": "longrope", "yarn": "longrope"},
            windows="all",
            defaults={
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
        ),
        "Qwen2ForCausalLM": Family(biases=(True, False), windows="some", defaults=_QWEN_DEFAULTS),
        "Qwen3MoeForCausalLM": Family(
            biases=None,
            qk_norm=True,
            windows="flag",
            experts=ExpertNames(
                "mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size"
            ),
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
        ),
        "Qwen3ForCausalLM": Family(
            biases=None, qk_norm=True, windows="some", defaults={**_QWEN_DEFAULTS, "head_dim": 128}
        ),
    }
)
