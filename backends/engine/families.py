"""The supported architectures, as features of one parameterised decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


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
            the layers, or `none`.
        defaults: values of absent fields, as in `transformers`. A null field is not absent.
    """

    biases: tuple[bool, bool] | None
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    partial_rotation: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
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

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
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
        "Qwen3ForCausalLM": Family(
            biases=None, qk_norm=True, windows="some", defaults={**_QWEN_DEFAULTS, "head_dim": 128}
        ),
    }
)
