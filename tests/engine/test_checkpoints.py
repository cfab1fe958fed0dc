"""Invalid checkpoints raise errors that name the file and the fault."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.checkpoint import Checkpoint, checkpoint_hash
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.families import FAMILIES
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.numerics import choose_dtype
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig


def load(directory: Path) -> None:
    Tokenizer(directory)
    load_weights(directory, read_model_config(directory), torch.float32)


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config.update(changes)
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def truncate(name: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:1000])

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut_in_half(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lie_about_the_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def shard(directory: Path) -> dict[str, str]:
    """Split the weights into two files and return the file name of each tensor."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    return {name: file for file, part in shards.items() for name in part}


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Callable[[Path], None]:
    """Shard the checkpoint, then damage a file or the index."""

    def edit(directory: Path) -> None:
        weight_map = shard(directory)
        change(directory, weight_map)
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))

    return edit


def index_of(text: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_text(text)

    return edit


QUERIES = "model.layers.0.self_attn.q_proj.weight"

DAMAGE = {
    "no config": (remove("config.json"), r"config\.json does not exist"),
    "no weights": (remove("model.safetensors"), r"no weights: .*model\.safetensors"),
    "no tokenizer": (remove("tokenizer.json"), r"no tokenizer: .*tokenizer\.json"),
    "cut config": (
        lambda directory: (directory / "config.json").write_text('{"architectures": ["Llama'),
        r"config\.json",
    ),
    "cut tokenizer": (truncate("tokenizer.json"), r"damaged tokenizer .*tokenizer\.json"),
    "template of bytes": (
        lambda directory: (directory / "chat_template.jinja").write_bytes(b"\xff"),
        r"damaged chat template .*chat_template\.jinja",
    ),
    "cut header": (truncate("model.safetensors"), r"damaged or missing weights .*safetensors"),
    "cut data": (cut_in_half, r"damaged or missing weights .*model\.safetensors"),
    "header longer than the file": (lie_about_the_header, r"damaged .*model\.safetensors"),
    "empty weights": (
        lambda directory: (directory / "model.safetensors").write_bytes(b""),
        r"damaged or missing weights .*model\.safetensors",
    ),
    "missing tensor": (
        edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
        r"model: tensor model\.norm\.weight is missing",
    ),
    "missing head": (
        edit_config(tie_word_embeddings=False),
        r"tensor lm_head\.weight is missing",
    ),
    "missing bias": (
        edit_config(attention_bias=True),
        r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is missing",
    ),
    "wrong shape": (
        edit_config(intermediate_size=64),
        r"model\.safetensors: tensor .*gate_proj\.weight has shape .* config\.json requires \(64, ",
    ),
    "other vocabulary": (
        edit_config(vocab_size=5000),
        r"tensor model\.embed_tokens\.weight has shape \(4096, .* config\.json requires \(5000, ",
    ),
    "integer weights": (
        edit_weights(lambda tensors: tensors.update({QUERIES: tensors[QUERIES].to(torch.int8)})),
        rf"safetensors: tensor {QUERIES} has dtype I8; supported: BF16, F16, F32",
    ),
    "index without a map": (index_of("{}"), r"damaged .*index\.json: no weight_map"),
    "index of no JSON": (index_of("[1"), r"damaged .*index\.json"),
    "missing shard": (
        sharded(lambda directory, _: (directory / "b.safetensors").unlink()),
        r"index\.json: tensor \S+ is in b\.safetensors, which does not exist",
    ),
    "cut shard": (
        sharded(lambda directory, _: truncate("b.safetensors")(directory)),
        r"damaged or missing weights .*b\.safetensors",
    ),
    "tensor in another shard": (
        sharded(lambda _, weight_map: weight_map.update({QUERIES: "b.safetensors"})),
        rf"b\.safetensors: tensor {QUERIES} is missing, but the index lists it",
    ),
    "tensor not in the index": (
        sharded(lambda _, weight_map: weight_map.pop(QUERIES)),
        rf"tensor {QUERIES} is missing",
    ),
    "index that climbs": (
        sharded(lambda _, weight_map: weight_map.update({QUERIES: "../model/a.safetensors"})),
        rf"index\.json: tensor {QUERIES}: '\.\./.*' is not a file of the checkpoint",
    ),
    "index that names the whole disk": (
        sharded(lambda _, weight_map: weight_map.update({QUERIES: "/etc/passwd"})),
        "'/etc/passwd' is not a file of the checkpoint",
    ),
    "index that names a number": (
        sharded(lambda _, weight_map: weight_map.update({QUERIES: 7})),
        "7 is not a file of the checkpoint",
    ),
}

GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}

UNSUPPORTED = {
    "architecture": (
        {"architectures": ["MambaForCausalLM"]},
        r"architectures 'Mamba\w+' is not supported; supported: Gemma2\w+, Gemma3\w+, G",
    ),
    "no architecture": ({"architectures": None}, r"architectures '\(none named\)' is not"),
    "architecture of numbers": ({"architectures": [7]}, "architectures 7 is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    "activation of Gemma": (
        {**GEMMA3, "hidden_activation": "relu"},
        "hidden_activation 'relu' is not supported; supported: gelu_pytorch_tanh",
    ),
    "attention to later tokens": (
        {**GEMMA3, "use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    "rotation": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        r"rope_parameters\.rope_type 'dynamic' is not supported; supported: default, linear, ",
    ),
    "rotation in part": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    "rotation by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters that differ between layers are not supported",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        r"quantization_config.quant_method 'bitsandbytes' is not supported; supported: ",
    ),
    "attention": (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 6},
        "layer_types 'linear_attention' is not supported; supported: full_attention",
    ),
}

PHI3 = {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
SLIDING = {**QWEN2, "use_sliding_window": True}

ABSURD = {
    "missing": ({"hidden_size": None}, "hidden_size is missing"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
    "negative": ({"vocab_size": -4096}, "vocab_size must be a whole number from 1"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size must be a whole number from 1"),
    "fraction": ({"hidden_size": 64.5}, r"hidden_size must be a whole number.* not 64\.5"),
    "huge": ({"intermediate_size": 10**15}, "intermediate_size must be a whole number from 1 to"),
    "endless layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number"),
    "text": ({"num_attention_heads": "8"}, "num_attention_heads must be a whole number.* '8'"),
    "true as a count": ({"num_key_value_heads": True}, "num_key_value_heads must be a whole.*True"),
    "list": ({"max_position_embeddings": [1]}, r"max_position_embeddings must be .* \[1\]"),
    "heads that do not share": (
        {"num_key_value_heads": 3},
        "num_attention_heads 8 is not a multiple of num_key_value_heads, 3",
    ),
    "heads that do not fit": (
        {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None},
        "hidden_size 256 is not a multiple of num_attention_heads, 6",
    ),
    "odd heads": ({"head_dim": 33}, "head_dim must be even for rotary embeddings, not 33"),
    "NaN": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number above 0, not nan"),
    "infinite": ({"rope_parameters": None, "rope_theta": math.inf}, "rope_theta must be a finite"),
    "theta that turns nothing": (
        {"rope_parameters": {"rope_theta": 1.0}},
        r"rope_parameters\.rope_theta must be a finite number above 1, not 1",
    ),
    "word for a flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    "rope of text": ({"rope_parameters": "long"}, "rope_parameters must be an object, not 'long'"),
    "factor missing": (
        {"rope_scaling": {"type": "linear"}},
        r"rope_scaling\.factor is missing",
    ),
    "factor zero": (
        {"rope_parameters": {**YARN, "factor": 0}},
        r"rope_parameters\.factor must be a finite number above 0",
    ),
    "no original context": (
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
        r"rope_parameters\.original_max_position_embeddings must be a whole number from 2",
    ),
    "bands the wrong way round": (
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
        r"rope_parameters\.high_freq_factor must be a finite number above 1, not 1",
    ),
    "factors of too few waves": (
        {**PHI3, "rope_parameters": {**LONGROPE, "short_factor": [1.0]}},
        r"rope_parameters\.short_factor must list 16 numbers, not \[1\.0\]",
    ),
    "factor of text": (
        {**PHI3, "rope_parameters": {**LONGROPE, "long_factor": ["2"] * 16}},
        r"rope_parameters\.long_factor must be a number, not '2'",
    ),
    "rotation of more than a head": (
        {**PHI3, "partial_rotary_factor": 1.5},
        "partial_rotary_factor must rotate an even number of 32 dimensions, not 1.5 of them",
    ),
    "rotation of nothing": (
        {**PHI3, "partial_rotary_factor": 0.01},
        "partial_rotary_factor must rotate an even number of 32 dimensions",
    ),
    "cap of nothing": (
        {**GEMMA3, "attn_logit_softcapping": 0.0},
        "attn_logit_softcapping must be a finite number above 0, not 0.0",
    ),
    "no text": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": [1]},
        r"text_config must be an object, not \[1\]",
    ),
    "field of the text": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": "x"}},
        r"text_config\.hidden_size must be a whole number",
    ),
    "layers of text": (
        {**QWEN3_MOE, "mlp_only_layers": ["0"]},
        r"mlp_only_layers must list layers, not \['0'\]",
    ),
    "more experts than there are": (
        {**QWEN3_MOE, "num_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok must be a whole number from 1 to 4, not 5",
    ),
    "types of too few layers": (
        {**QWEN2, "layer_types": ["full_attention"]},
        "layer_types must list a type for each of the 6 layers",
    ),
    "sliding without a window": (
        {**QWEN2, "layer_types": ["sliding_attention"] * 6},
        "layer_types has sliding layers, but no sliding window is in use",
    ),
    "window of nothing": ({**SLIDING, "sliding_window": 0}, "sliding_window must be a whole"),
    "window of text": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"},
        "sliding_window must be a whole number",
    ),
    "fewer than no layers": (
        {**SLIDING, "max_window_layers": -1},
        "max_window_layers must be a whole number from 0",
    ),
    "millions of experts": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 24},
        "num_local_experts 16777216 is too large",
    ),
    "end token of text": (
        {"eos_token_id": "</s>"},
        "eos_token_id must be a token id or a list of token ids, not",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_raises_an_error_naming_the_fault(
    name: str, checkpoint_copy: Path
) -> None:
    """A missing, truncated or inconsistent file raises an error that names the file and the
    tensor."""
    damage, message = DAMAGE[name]
    damage(checkpoint_copy)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint_copy)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_config_value_is_named(name: str, checkpoint_copy: Path) -> None:
    """The error names file, field, value and the supported values, and suggests an upstream."""
    changes, message = UNSUPPORTED[name]
    edit_config(**changes)(checkpoint_copy)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}") as raised:
        read_model_config(checkpoint_copy)
    assert "vLLM or SGLang, use `--backend openai --upstream URL`" in str(raised.value)


@pytest.mark.parametrize("name", ABSURD)
def test_invalid_config_value_is_named(name: str, checkpoint_copy: Path) -> None:
    """An invalid value raises an error that names file, field and value."""
    changes, message = ABSURD[name]
    edit_config(**changes)(checkpoint_copy)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read_model_config(checkpoint_copy)


@pytest.mark.parametrize("value", [None, True, -1, 0, 1e300, "x", [], {}, [[]] * 6, {"a": {}}])
def test_any_config_value_is_read_or_rejected(value: object, checkpoint_copy: Path) -> None:
    """The loader reads any JSON value of any field or raises CheckpointError."""
    path = checkpoint_copy / "config.json"
    sound = json.loads(path.read_text())
    for name in {*sound, "rope_scaling", "quantization_config", "layer_types", "sliding_window"}:
        for architecture in FAMILIES:
            path.write_text(json.dumps({**sound, "architectures": [architecture], name: value}))
            with contextlib.suppress(CheckpointError):
                assert read_model_config(checkpoint_copy).num_layers > 0


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    """The error contains the path of the missing checkpoint."""
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        load_weights(tmp_path, read_model_config(tmp_path / "nowhere"), torch.float32)


def test_tokenizer_larger_than_the_embedding_is_rejected(checkpoint_copy: Path) -> None:
    """The loader rejects a tokenizer that has more tokens than the embedding."""
    edit_config(vocab_size=4000)(checkpoint_copy)
    with pytest.raises(
        CheckpointError, match=r"largest id is 4095, but config\.json has vocab_size 4000"
    ):
        load_engine(WorkerConfig(model=str(checkpoint_copy)))


def test_sharded_checkpoint_has_the_parameters_of_one_file(checkpoint_copy: Path) -> None:
    """Shards with an index have as many parameters as the single file."""
    sharded(lambda *_: None)(checkpoint_copy)
    load(checkpoint_copy)
    assert Checkpoint(checkpoint_copy).num_parameters == Checkpoint(SHIPPED_MODEL).num_parameters


def test_auto_dtype_is_float32_for_the_shipped_model() -> None:
    """The dtype `auto` is float32 for the shipped model, and an unknown dtype raises an error."""
    assert choose_dtype("auto", SHIPPED_MODEL) is torch.float32
    assert choose_dtype("bfloat16", SHIPPED_MODEL) is torch.bfloat16
    with pytest.raises(ValueError, match="unknown dtype 'int3'"):
        choose_dtype("int3", SHIPPED_MODEL)


def test_checkpoint_hash_depends_on_the_contents(checkpoint_copy: Path) -> None:
    """Equal files have equal hashes, and a changed weight changes the hash."""
    before = checkpoint_hash(checkpoint_copy)
    assert before == checkpoint_hash(SHIPPED_MODEL)
    edit_weights(lambda tensors: tensors["model.norm.weight"].add_(1))(checkpoint_copy)
    assert checkpoint_hash(checkpoint_copy) != before


def test_shipped_models_are_below_25_mb() -> None:
    """The language models and the query tower together are smaller than 25 MB."""
    files = [path for path in SHIPPED_MODEL.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25e6
