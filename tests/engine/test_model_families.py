"""Every supported model family and variant, compared with transformers.

The tests import transformers only when they use it, because the import takes two seconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.weights import load_weights
from tests.engine.step_logits import blocks_of, logits_in_steps, runner_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = {
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}

TOKENS = 150
"""A length beyond every window and every original context below."""

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

SLIDING = {"use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 3}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 1.8, 2.0, 2.2, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 9.0, 12.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


EXPERTS = {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
GEMMA = {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24}


def rope(settings: dict[str, object], theta: float = 10000.0) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": theta, **settings}}


VARIANTS = {
    "llama": ("llama", {}),
    "llama-eight-heads-on-two": ("llama", {"num_attention_heads": 8}),
    "llama-one-kv-head": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96},
    ),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 48}),
    "llama-three-layers-and-another-theta": ("llama", {"num_hidden_layers": 3, **rope({}, 5e5)}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-linear": ("llama", rope(LINEAR)),
    "llama-llama3": ("llama", rope(LLAMA3, 5e5)),
    "llama-yarn": ("llama", rope(YARN)),
    "mistral-windows": ("mistral", {"sliding_window": 40}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "mistral-without-windows": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-eight-kv-heads": (
        "mixtral",
        {"num_local_experts": 3, "num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "mixtral-windows": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 40},
    ),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-shares-below-one": ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 1}),
    "qwen3-moe-some-layers": (
        "qwen3_moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 40,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-multi-head": ("phi3", {"num_key_value_heads": 4}),
    "phi3-windows": ("phi3", {"sliding_window": 40, "num_key_value_heads": None}),
    "phi3-some-dimensions-rotate": ("phi3", rope({"partial_rotary_factor": 0.75})),
    "phi3-wide-heads-rotate-in-part": (
        "phi3",
        {
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            **rope({"partial_rotary_factor": 0.75}),
        },
    ),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 64, **rope(LONGROPE)}),
    "phi3-longrope-with-its-attention-factor": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "num_attention_heads": 2,  # as Phi-4-mini: 16 of 32 dimensions
            **rope({**LONGROPE, "attention_factor": 1.3, "partial_rotary_factor": 0.5}),
        },
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-without-caps": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2-tight-caps-and-bias": (
        "gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 0.7,
            "attention_bias": True,
            "query_pre_attn_scalar": 5,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 2}),
    "gemma3-global-layers-stretch": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-layers-slide": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2-named-layers-slide": (
        "qwen2",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2-yarn": ("qwen2", rope(YARN, 1e6)),
    "qwen2-yarn-blunt": ("qwen2", rope({**YARN, "truncate": False, "beta_fast": 20.0}, 1e6)),
    "qwen2-yarn-with-its-attention-factor": (
        "qwen2",
        rope({**YARN, "attention_factor": 1.3, "beta_slow": 2.0}, 1e6),
    ),
    "qwen2-yarn-with-mscale": ("qwen2", rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5})),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-some-layers-slide": ("qwen3", {"head_dim": 32, **SLIDING, "max_window_layers": 2}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, **rope(YARN, 1e6)}),
}


def random_model(variant: str) -> PreTrainedModel:
    """Create a random model of a variant."""
    return random_model_of(*VARIANTS[variant])


def random_model_of(family: str, changes: dict[str, object]) -> PreTrainedModel:
    """Create a random model in which every tensor matters, with norms unlike 1 and biases
    unlike 0."""
    import transformers

    prefix = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif "norm" in name:
                # Gemma adds 1 to the weights of norms.
                tensor.normal_(0.0 if family.startswith("gemma") else 1.0, 0.3)
    return built.eval()


def oracle(directory: Path) -> PreTrainedModel:
    """Load the directory with transformers in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )


def check_logits(directory: Path, length: int = TOKENS, max_model_len: int = 2048) -> None:
    """Compare the logits of a sequence in uneven steps with those of transformers."""
    model = oracle(directory)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (length,), generator=generator)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    steps = [0, 1, 2, *(edge for edge in (60, 65, 130) if edge < length), length]
    table, runner = blocks_of(0, length), runner_of(directory, max_model_len=max_model_len)
    logits = logits_in_steps(runner, table, tokens.tolist(), steps)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Logits of random models agree with transformers to 1e-4 and have the same argmax."""
    random_model(variant).save_pretrained(tmp_path)
    check_logits(tmp_path)


def test_logits_of_the_shipped_model_equal_transformers() -> None:
    """The shipped checkpoint has the logits of transformers."""
    check_logits(SHIPPED_MODEL)


GREEDY = [
    "gemma2",
    "gemma3-global-layers-stretch",
    "llama-llama3",
    "llama-attention-bias",
    "mistral-windows",
    "mixtral",
    "phi3-some-dimensions-rotate",
    "qwen2-some-layers-slide",
    "qwen2-yarn",
    "qwen3",
    "qwen3-moe",
]
NEW_TOKENS = 60
MARGIN = 1e-3
"""Ten times the allowed error of a logit. Logits with this distance keep their order."""


@pytest.mark.parametrize("variant", GREEDY)
def test_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Greedy decoding beyond the window and the original context gives the same ids."""
    random_model(variant).save_pretrained(tmp_path)
    prompt = torch.randint(0, 300, (1, 30), generator=torch.Generator().manual_seed(2))
    generated = oracle(tmp_path).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(generated.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN
    runner, table = runner_of(tmp_path), blocks_of(0, 30 + NEW_TOKENS)
    tokens = prompt[0].tolist()
    edges = [0, 30]
    while len(tokens) < 30 + NEW_TOKENS:
        logits = logits_in_steps(runner, table, tokens, edges[-2:])
        tokens.append(int(logits[-1].argmax()))
        edges.append(len(tokens))
    assert tokens == generated.sequences[0].tolist()


@pytest.mark.parametrize(
    "variant",
    ["gemma2-tight-caps-and-bias", "gemma3", "mixtral", "phi3-longrope", "qwen3-moe"],
)
def test_logits_have_the_same_bits_in_steps_of_any_size(variant: str, tmp_path: Path) -> None:
    """The logits of a token have the same bits alone, in blocks and in a prompt."""
    random_model(variant).save_pretrained(tmp_path)
    tokens = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    runner = runner_of(tmp_path)
    alone, *others = (
        logits_in_steps(runner, blocks_of(0, 100), tokens, edges)
        for edges in ([*range(101)], [0, 100], [0, *range(33, 100, 5), 100])
    )
    assert all(torch.equal(alone, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["gemma3", "llama-tied", "qwen2", "qwen3-bias"])
def test_half_precision_checkpoint_has_the_logits_of_float32(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Weights saved in bfloat16 or float16 give the same float32 logits as transformers."""
    random_model(variant).to(dtype).save_pretrained(tmp_path)
    check_logits(tmp_path)


@pytest.mark.parametrize("variant", ["llama-tied", "mistral-windows", "qwen2", "qwen3-bias"])
def test_sharded_checkpoint_has_the_same_logits(variant: str, tmp_path: Path) -> None:
    """A checkpoint has the same logits when its layers are split over many shards."""
    random_model(variant).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_logits(tmp_path)


def rewrite_config(directory: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    "variant", ["llama-linear", "llama-llama3", "phi3-longrope", "qwen2-yarn", "qwen3"]
)
def test_older_rope_field_names_are_read(variant: str, key: str, tmp_path: Path) -> None:
    """The loader reads `rope_scaling` beside `rope_theta`, as in older checkpoints."""

    def age(config: dict[str, object]) -> None:
        settings = config.pop("rope_parameters")
        config["rope_theta"] = settings.pop("rope_theta")
        kind = settings.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {key: kind, **settings}

    random_model(variant).save_pretrained(tmp_path)
    rewrite_config(tmp_path, age)
    check_logits(tmp_path)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_names_of_longrope_are_read(kind: str, tmp_path: Path) -> None:
    """The rotations `su` and `yarn` of early Phi-3 configs are LongRoPE."""
    random_model("phi3-longrope").save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    rewrite_config(tmp_path, lambda config: config["rope_parameters"].update(rope_type=kind))
    assert read_model_config(tmp_path) == expected


def test_longrope_uses_the_short_factors_if_all_contexts_are_short(tmp_path: Path) -> None:
    """A worker whose contexts fit in the original context has the logits of transformers, and
    another numerics class than a worker of longer contexts."""
    random_model("phi3-longrope").save_pretrained(tmp_path)
    check_logits(tmp_path, length=64, max_model_len=64)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32)
    names = [Decoder(config, weights, positions).arithmetic for positions in (64, 65)]
    assert names[0].endswith("-longrope-short")
    assert names[1].endswith("-longrope-long")


SILENT = {
    "llama": ["num_key_value_heads", "attention_bias", "mlp_bias", "head_dim", "rope_parameters"],
    "gemma2": ["layer_types", "tie_word_embeddings", "hidden_activation", "rope_parameters"],
    "gemma3": ["layer_types", "rope_parameters", "attn_logit_softcapping", "rms_norm_eps"],
    "mistral-windows": ["sliding_window", "rope_parameters", "rms_norm_eps"],
    "mistral-without-windows": ["tie_word_embeddings"],
    "mixtral": ["rope_parameters", "rms_norm_eps", "num_experts_per_tok", "num_key_value_heads"],
    "qwen3-moe-some-layers": ["norm_topk_prob", "max_position_embeddings"],
    "phi3": ["num_key_value_heads", "original_max_position_embeddings", "rope_parameters"],
    "qwen2": ["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"],
    "qwen2-some-layers-slide": ["layer_types"],
    "qwen3-bias": ["layer_types", "tie_word_embeddings", "max_position_embeddings"],
}


@pytest.mark.parametrize("variant", SILENT)
def test_missing_config_fields_have_the_defaults_of_transformers(
    variant: str, tmp_path: Path
) -> None:
    """A config without optional fields describes the same model as in transformers."""
    full = {
        "llama": "llama-multi-head",
        "mixtral": "mixtral-eight-kv-heads",
        "phi3": "phi3-multi-head",
    }
    model = random_model(full.get(variant, variant))
    model.save_pretrained(tmp_path)
    rewrite_config(tmp_path, lambda config: [config.pop(name, None) for name in SILENT[variant]])
    check_logits(tmp_path)


def rewrite_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def head_as_well(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def another_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def head_alone(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def rotary_buffers(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@pytest.mark.parametrize("change", [head_as_well, another_head, head_alone, rotary_buffers])
def test_tied_checkpoint_variants_have_the_same_logits(
    change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    """A model has the same logits if its tied head is stored twice, renamed, or the only stored
    copy."""
    random_model("llama-tied").save_pretrained(tmp_path)
    rewrite_weights(tmp_path, change)
    check_logits(tmp_path)


@pytest.mark.parametrize(
    ("variant", "names"),
    [("mixtral", "block_sparse_moe w1 w3 w2"), ("qwen3-moe", "mlp gate_proj up_proj down_proj")],
)
def test_experts_of_a_gpu_are_stacked_in_their_order(
    variant: str, names: str, tmp_path: Path
) -> None:
    """The matrices for a GPU hold the gate, then the up matrix of each expert, and its down
    matrix."""
    pytest.importorskip("triton")
    random_model(variant).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32, for_gpu=True)
    stored = load_file(tmp_path / "model.safetensors")
    block, gate, up, down = names.split()
    for layer, loaded in enumerate(weights.layers):
        experts = loaded.mlp.experts
        for expert in range(config.experts.count):
            prefix = f"model.layers.{layer}.{block}.experts.{expert}."
            parts = [stored[f"{prefix}{name}.weight"] for name in (gate, up, down)]
            assert torch.equal(experts.gate_up[expert], torch.cat(parts[:2]))
            assert torch.equal(experts.down[expert], parts[2])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_of_a_model_with_images_has_the_same_logits(prefix: str, tmp_path: Path) -> None:
    """The decoder of a Gemma 3 checkpoint with images is read, and its other tensors are not."""
    random_model("gemma3").save_pretrained(tmp_path)

    def add_images(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors["vision_tower.vision_model.head.bias"] = torch.ones(3)

    text, images = tmp_path / "text", tmp_path / "images"
    for directory in (text, images):
        shutil.copytree(tmp_path, directory, ignore=lambda *_: {"text", "images"})
    rewrite_weights(images, add_images)
    path = images / "config.json"
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": json.loads(path.read_text()),
    }
    path.write_text(json.dumps(whole))
    tokens = list(range(50))
    found, expected = (
        logits_in_steps(runner_of(directory), blocks_of(0, 50), tokens, [0, 50])
        for directory in (images, text)
    )
    assert torch.equal(found, expected)


def test_older_names_of_local_rotations_are_read(tmp_path: Path) -> None:
    """The loader reads the rotations of Gemma 3 from the fields of earlier checkpoints."""

    def age(config: dict[str, object]) -> None:
        settings = config.pop("rope_parameters")
        everywhere, local = settings["full_attention"], settings["sliding_attention"]
        config["rope_theta"] = everywhere.pop("rope_theta")
        config["rope_local_base_freq"] = local.pop("rope_theta")
        config["rope_scaling"] = everywhere

    random_model("gemma3-global-layers-stretch").save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    rewrite_config(tmp_path, age)
    assert read_model_config(tmp_path) == expected


def test_yarn_checkpoint_serves_the_extended_context(tmp_path: Path) -> None:
    """A YaRN checkpoint with an original context serves the extended context."""
    random_model("qwen2-yarn").save_pretrained(tmp_path)
    rewrite_config(tmp_path, lambda config: config.update(max_position_embeddings=64))
    assert read_model_config(tmp_path).max_position_embeddings == 256
    check_logits(tmp_path)
