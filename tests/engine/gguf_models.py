"""Writes Hugging Face checkpoints as GGUF files, as the converter of llama.cpp does.

The names of tensors are those of the `gguf` package, and so are the quantised weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
BYTES = [chr(n) for n in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
"""The characters of byte-level BPE."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def converted(
    directory: Path, path: Path, kind: Kind = Kind.F32, change: Callable[[Any], None] | None = None
) -> None:
    """Write a checkpoint as a GGUF file, and round its matrices as the file does.

    Args:
        directory: a checkpoint whose only weights are `model.safetensors`.
        path: the file to write.
        kind: the type of the matrices.
        change: adds metadata.
    """
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_shape(writer, config)
    add_rotation(writer, config)
    add_tokenizer(writer, config["vocab_size"])
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    permuted = architecture is gguf.MODEL_ARCH.LLAMA
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in sorted(weights.items(), key=lambda pair: _order(pair[0])):
        values = weight.float().numpy()
        stored = Kind.F32 if values.ndim == 1 or ".gate.weight" in name else kind
        packed = gguf.quants.quantize(values, stored)
        rounded = gguf.quants.dequantize(packed, stored)
        weights[name] = torch.from_numpy(rounded.astype(np.float32).copy())
        if permuted and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            packed = permute(packed, config[heads])
        if "gemma" in config["model_type"] and name.endswith("norm.weight"):
            packed += 1
        expert = EXPERT.fullmatch(name)
        if expert:
            stack = experts.setdefault(f"{expert['block']}.{expert['part']}.weight", [])
            stack.append(packed)
            if len(stack) < _count(config):
                continue
            packed = np.stack(stack)
        joined = f"{expert['block']}.{expert['part']}.weight" if expert else name
        written = names.get_name(joined, try_suffixes=(".weight", ".bias"))
        assert written, name
        writer.add_tensor(written, packed, raw_dtype=stored)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put rows j and j + half of each head side by side."""
    half = len(rows) // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """Write the keys of the shape of a model."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(_count(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if "gemma" in config["model_type"]:
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_rotation(writer: Any, config: dict[str, Any]) -> None:
    """Write the keys of the rotation, and the tensors with its factors."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, rotated))
        case "longrope":
            scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
            usual = math.sqrt(
                1 + math.log(scale) / math.log(rope["original_max_position_embeddings"])
            )
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or usual)
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)


def llama3_divisors(rope: dict[str, Any], rotated: int) -> np.ndarray:
    """Return the factor by which Llama 3.1 divides each frequency."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for place in range(0, rotated, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (place / rotated)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def add_tokenizer(writer: Any, size: int) -> None:
    """Write a byte-level tokenizer with one merge and control tokens."""
    tokens = [*BYTES, "he", *SPECIAL]
    tokens += [f"<|{n}|>" for n in range(size - len(tokens))]
    types = [gguf.TokenType.NORMAL] * (len(BYTES) + 1)
    types += [gguf.TokenType.CONTROL] * (size - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(tokens.index(SPECIAL[0]))


def _order(name: str) -> tuple[str, int]:
    expert = EXPERT.fullmatch(name)
    return (name, 0) if expert is None else (expert["part"], int(expert["expert"]))


def _count(config: dict[str, Any]) -> int:
    return config.get("num_local_experts") or config["num_experts"]
