"""Configs of published models are read as their model cards describe."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from draftgate.backends.engine.weights import layer_shapes

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, **LLAMA3_ROPE},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
SHORT_FACTORS = [1.0 + 0.01 * wave for wave in range(48)]
LONG_FACTORS = [1.0 + wave for wave in range(48)]
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@dataclass(frozen=True)
class Published:
    """The values that a published model has in its card and in its config."""

    raw: dict[str, object]
    parameters: int
    head_dim: int
    kv_bytes_per_token: int
    """Bytes of a number in bfloat16."""
    context: int
    rope: Rope
    window: int | None = None
    full_every: int = 0
    """Number of layers of which the last has no window, or 0 if all layers are alike."""
    local_rope: Rope | None = None
    """Rotation of layers with a window, if it differs."""


MODELS = {
    "Llama-2-7B": Published(
        {
            "architectures": ["LlamaForCausalLM"],
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        6_738_415_616,
        128,
        524_288,
        4096,
        Rope(10000.0),
    ),
    "Llama-3.1-8B": Published(
        LLAMA3_8B,
        8_030_261_248,
        128,
        131_072,
        131072,
        Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ),
    "Llama-3.2-1B": Published(
        LLAMA3_8B
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": {"factor": 32.0, **LLAMA3_ROPE},
            "tie_word_embeddings": True,
        },
        1_235_814_400,
        64,
        32_768,
        131072,
        Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ),
    "Mistral-7B-v0.1": Published(
        MISTRAL_7B, 7_241_732_096, 128, 131_072, 32768, Rope(10000.0), window=4096
    ),
    "Mixtral-8x7B": Published(
        MISTRAL_7B
        | {
            "architectures": ["MixtralForCausalLM"],
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        46_702_792_704,
        128,
        131_072,
        32768,
        Rope(1000000.0),
    ),
    "Mistral-7B-v0.3": Published(
        MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        7_248_023_552,
        128,
        131_072,
        32768,
        Rope(1000000.0),
    ),
    "Gemma-2-9B": Published(
        GEMMA2_9B, 9_241_705_984, 256, 344_064, 8192, Rope(10000.0), window=4096, full_every=2
    ),
    "Gemma-3-1B": Published(
        GEMMA3_1B,
        999_885_952,
        256,
        26_624,
        32768,
        Rope(1000000.0),
        window=512,
        full_every=6,
        local_rope=Rope(10000.0),
    ),
    # The parameters are those of the text, without the 416,866,032 of the images and 2,950,272 of
    # the projector.
    "Gemma-3-4B": Published(
        GEMMA3_4B,
        4_300_079_472 - 416_866_032 - 2_950_272,
        256,
        139_264,
        131072,
        Rope(1000000.0, LinearScaling(8.0)),
        window=1024,
        full_every=6,
        local_rope=Rope(10000.0),
    ),
    "Phi-3-mini-4k": Published(
        PHI3_MINI, 3_821_079_552, 96, 393_216, 4096, Rope(10000.0), window=2047
    ),
    "Phi-4": Published(
        PHI3_MINI
        | {
            "eos_token_id": 100265,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "sliding_window": None,
            "vocab_size": 100352,
        },
        14_659_507_200,
        128,
        204_800,
        16384,
        Rope(250000.0),
    ),
    # The published factors, which make no other difference, are replaced by round numbers.
    "Phi-4-mini": Published(
        PHI3_MINI
        | {
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "long_factor": LONG_FACTORS,
                "short_factor": SHORT_FACTORS,
                "type": "longrope",
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        3_836_021_760,
        128,
        131_072,
        131072,
        Rope(
            10000.0,
            LongRopeScaling(
                tuple(SHORT_FACTORS),
                tuple(LONG_FACTORS),
                math.sqrt(1 + math.log(32) / math.log(4096)),
                4096,
            ),
            0.75,
        ),
        window=262144,
    ),
    "Qwen2.5-0.5B": Published(
        QWEN25_7B
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "vocab_size": 151936,
        },
        494_032_768,
        64,
        12_288,
        32768,
        Rope(1000000.0),
    ),
    "Qwen2.5-7B": Published(QWEN25_7B, 7_615_616_512, 128, 57_344, 32768, Rope(1000000.0)),
    "Qwen2.5-7B with YaRN": Published(
        QWEN25_7B
        | {
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            }
        },
        7_615_616_512,
        128,
        57_344,
        131072,
        Rope(1000000.0, YarnScaling(4.0, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0, True, 32768)),
    ),
    "Qwen3-0.6B": Published(
        QWEN3_8B
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
        596_049_920,
        128,
        114_688,
        40960,
        Rope(1000000.0),
    ),
    "Qwen3-30B-A3B": Published(QWEN3_30B, 30_532_122_624, 128, 98_304, 40960, Rope(1000000.0)),
    "Qwen3-8B": Published(QWEN3_8B, 8_190_735_360, 128, 147_456, 40960, Rope(1000000.0)),
}


def parameters_of(config: ModelConfig) -> int:
    """Return the number of parameters of this shape, with tied matrices counted once."""
    matrices = 1 if config.tied_embeddings else 2
    outside = config.hidden_size * (config.vocab_size * matrices + 1)
    return outside + sum(map(math.prod, layer_shapes(config).values()))


@pytest.mark.parametrize("name", MODELS)
def test_published_config_matches_the_model_card(name: str, tmp_path: Path) -> None:
    """Each published config has the parameters, KV size, context, window and rotation of its model
    card."""
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(model.raw))
    config = read_model_config(tmp_path)
    assert parameters_of(config) == model.parameters
    assert config.head_dim == model.head_dim
    assert config.kv_bytes_per_token(2) == model.kv_bytes_per_token
    assert config.max_position_embeddings == model.context
    assert config.rope == model.rope
    every = model.full_every or config.num_layers + 1
    windows = tuple(
        None if (layer + 1) % every == 0 else model.window for layer in range(config.num_layers)
    )
    assert config.windows == windows
    local = model.local_rope
    ropes = tuple(model.rope if window is None else local for window in windows)
    assert config.layer_ropes == (ropes if local else ())
    assert config.rms_norm_eps == model.raw.get("rms_norm_eps", 1e-6)
    architecture = model.raw["architectures"][0]
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.qk_norm == architecture.startswith(("Qwen3", "Gemma3"))
    assert not config.output_bias
    assert not config.mlp_bias
    assert config.eos_ids
