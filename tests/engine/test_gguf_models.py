"""Models in GGUF files, compared with transformers on the same weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader, checkpoint_hash
from draftgate.backends.engine.gguf.blocks import unpack
from draftgate.backends.engine.load import load_engine
from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf import folder
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig
from tests.engine.gguf_models import BYTES, converted
from tests.engine.step_logits import blocks_of, logits_in_steps, runner_of
from tests.engine.test_model_families import (
    EXPERTS,
    LINEAR,
    LLAMA3,
    LONGROPE,
    TOKENS,
    YARN,
    oracle,
    random_model_of,
    rope,
)

WIDE = {"intermediate_size": 160}
"""A width that blocks of 32 values divide."""

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40}
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "llama": ("llama", {}, Kind.Q8_0),
    "llama-4-bits": ("llama", {}, Kind.Q4_1),
    "llama-5-bits": ("llama", {}, Kind.Q5_0),
    "llama-bfloat16": ("llama", {"num_key_value_heads": 1}, Kind.BF16),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, Kind.F16),
    "llama-wide-heads": ("llama", {"head_dim": 48}, Kind.Q4_0),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, Kind.F32),
    "llama-linear": ("llama", rope(LINEAR), Kind.F32),
    "llama-llama3": ("llama", rope(LLAMA3, 5e5), Kind.Q5_1),
    "llama-yarn": ("llama", rope(YARN), Kind.F32),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, Kind.Q8_0),
    "qwen2": ("qwen2", {}, Kind.Q8_0),
    "qwen2-yarn": ("qwen2", rope(YARN, 1e6), Kind.F32),
    "qwen3": ("qwen3", {"head_dim": 32}, Kind.Q8_0),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, Kind.Q8_0),
    "qwen3-moe": (
        "qwen3_moe",
        {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
        Kind.Q8_0,
    ),
    "gemma2": ("gemma2", {**GEMMA, "num_hidden_layers": 3}, Kind.Q8_0),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}, Kind.Q8_0),
    "gemma3-stretched": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": PATTERN,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        Kind.F32,
    ),
    "phi3": ("phi3", {"sliding_window": None}, Kind.Q8_0),
    "phi3-windows": ("phi3", {"sliding_window": 40}, Kind.Q8_0),
    "phi3-partial": ("phi3", rope({"partial_rotary_factor": 0.75}), Kind.F32),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 64, **rope(LONGROPE)},
        Kind.Q8_0,
    ),
    "phi3-longrope-with-its-attention-factor": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "num_attention_heads": 2,
            **rope({**LONGROPE, "attention_factor": 1.3, "partial_rotary_factor": 0.5}),
        },
        Kind.F32,
    ),
}


def added(variant: str):
    """Return a function that writes the keys that the config of a variant does not imply."""

    def change(writer: Any) -> None:
        if variant == "gemma3-stretched":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in PATTERN])
            writer.add_rope_freq_base_swa(500.0)

    return change


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_on_the_same_weights(variant: str, tmp_path: Path) -> None:
    """Logits agree to 1e-4 with transformers, whose matrices were rounded as in the file."""
    family, changes, kind = VARIANTS[variant]
    random_model_of(family, {**WIDE, **changes}).save_pretrained(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf", kind, added(variant))
    tokens = torch.randint(0, 300, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = oracle(tmp_path)(tokens[None]).logits[0]
    runner = runner_of(settings_folder(tmp_path / "model.gguf", tmp_path / "cache"))
    steps = [0, 1, 2, 60, 65, 130, TOKENS]
    logits = logits_in_steps(runner, blocks_of(0, TOKENS), tokens.tolist(), steps)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


REAL = Path(os.environ.get("REAL_MODELS", ""))
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "file"),
    [("smollm2", "smollm2-q4_1.gguf"), ("gemma3", "gemma3-270m-q4_k_m.gguf")],
)
def test_real_models_have_the_bits_of_their_unpacked_weights(
    name: str, file: str, tmp_path: Path
) -> None:
    """Logits have the same bits as those of a safetensors checkpoint with the unpacked weights."""
    if not (REAL / file).is_file():
        pytest.skip("no real models")
    directory = settings_folder(REAL / file, tmp_path)
    tokens = Tokenizer(directory).encode(PROMPT)
    packed, unpacked = (
        logits_in_steps(runner_of(place, 16, 256), blocks_of(0, 256), tokens, [0, 5, len(tokens)])
        for place in (directory, REAL / name)
    )
    assert torch.equal(packed, unpacked)


def test_packed_rows_unpack_to_the_values_that_are_read(tmp_path: Path) -> None:
    """Packed rows are in the order of the Hugging Face layout, also those that files permute."""
    random_model_of("llama", WIDE).save_pretrained(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf", Kind.Q5_0)
    directory = settings_folder(tmp_path / "model.gguf", tmp_path / "cache")
    checkpoint = Checkpoint(directory)
    expected = load_file(tmp_path / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    total = []
    with TensorReader(checkpoint, torch.float32, total.append) as reader:
        for name, values in expected.items():
            kind, rows = reader.read_packed(name)
            assert kind.name == ("Q5_0" if values.dim() == 2 else "F32")
            assert torch.equal(unpack(kind, rows).view(values.shape), values)
            assert torch.equal(reader.read([name]), values)
            assert checkpoint.tensors[name].num_bytes == rows.numel()
    assert sum(total) == 2 * sum(one.num_bytes for one in checkpoint.tensors.values())


def test_hash_depends_on_the_content_alone(tmp_path: Path) -> None:
    """A copy of a file has the same hash, so that workers on other machines share KV blocks."""
    random_model_of("llama", WIDE).save_pretrained(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(data)
    first, copy, other = (
        checkpoint_hash(settings_folder(tmp_path / f"{name}.gguf", tmp_path / "cache"))
        for name in ("model", "copy", "other")
    )
    assert first == copy != other


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    """A file that was cut after its header was read is an error, not a crash."""
    random_model_of("llama", WIDE).save_pretrained(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf")
    checkpoint = Checkpoint(settings_folder(tmp_path / "model.gguf", tmp_path / "cache"))
    os.truncate(tmp_path / "model.gguf", (tmp_path / "model.gguf").stat().st_size - 64)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].source.offset)
    with (
        TensorReader(checkpoint, torch.float32, lambda _bytes: None) as reader,
        pytest.raises(CheckpointError, match="ends before"),
    ):
        reader.read([last])


def test_worker_serves_a_file_with_its_stops_and_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of a worker has the name of the file, its context, end tokens and defaults."""
    monkeypatch.setattr(folder, "cache_directory", lambda: tmp_path / "cache")
    random_model_of("qwen2", WIDE).save_pretrained(tmp_path)

    def change(writer: Any) -> None:
        writer.add_sampling_temp(0.5)
        writer.add_chat_template("{{ messages[0].content }}")

    converted(tmp_path, tmp_path / "tiny-Q8_0.gguf", Kind.Q8_0, change)
    config = WorkerConfig(model=str(tmp_path / "tiny-Q8_0.gguf"), device="cpu", threads=1)
    served = load_engine(config).served
    assert served.card.model_id == "tiny-Q8_0"
    assert served.card.max_model_len == 512
    first = len(BYTES) + 1
    # <|endoftext|> is the end of the file's texts, and <|im_end|> that of a turn.
    assert set(served.card.eos_ids) == {first, first + 2}
    assert served.card.defaults.given() == {"temperature": 0.5}
