"""The shape of a model, read from `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backends.errors import CheckpointError
from backends.tokenizer import read_json

SUPPORTED_ARCHITECTURES: Final = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape.

    Attributes:
        head_dim: width of one attention head; not always `hidden_size / num_heads`.
        num_kv_heads: key and value heads; each serves `num_heads / num_kv_heads` query heads.
        tied_embeddings: the LM head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied_embeddings: bool
    eos_ids: frozenset[int]

    @property
    def query_group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`.

    Raises:
        CheckpointError: the directory or a field is missing, or the model is not supported.
    """
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint: {directory} is not a directory")
    path = directory / "config.json"
    raw = read_json(path)
    eos_ids = _eos_ids(path) | _eos_ids(directory / "generation_config.json")
    try:
        _check_supported(raw, path)
        return _parse(raw, eos_ids)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"damaged {path}: missing or wrong field {error}") from error


def _parse(raw: Mapping[str, Any], eos_ids: frozenset[int]) -> ModelConfig:
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    config = ModelConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_count(raw, "num_key_value_heads", heads),
        head_dim=_count(raw, "head_dim", hidden // heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(_rope(raw).get("rope_theta", 10000.0)),
        max_position_embeddings=_count(raw, "max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=eos_ids,
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    return config


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that counts something; `default` stands for one that is missing or null."""
    value = int(raw[name] if default is None else raw.get(name) or default)
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, not {value}")
    return value


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    architectures = raw.get("architectures") or ["(none named)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise CheckpointError(
            f"{path}: architecture {architectures[0]} is not supported; supported: {supported}"
        )
    rope_type = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    if rope_type != "default":
        raise CheckpointError(f"{path}: RoPE scaling {rope_type!r} is not supported yet")
    activation = raw.get("hidden_act") or "silu"
    if activation != "silu":
        raise CheckpointError(f"{path}: activation {activation!r} is not supported yet")
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise CheckpointError(f"{path}: {flag} is not supported yet")


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE settings: `rope_parameters` (newer), or the older fields."""
    if raw.get("rope_parameters"):
        newer: Mapping[str, Any] = raw["rope_parameters"]
        return newer
    older = dict(raw.get("rope_scaling") or {})
    if "rope_theta" in raw:
        older["rope_theta"] = raw["rope_theta"]
    return older


def _eos_ids(path: Path) -> frozenset[int]:
    """Return the end tokens a file names: `generation_config.json` may know more than the config.

    Raises:
        CheckpointError: what it names are no token ids.
    """
    value = read_json(path, missing={}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"damaged {path}: eos_token_id must be token ids, not {value!r}")
    return frozenset(ids)
