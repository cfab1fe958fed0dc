"""Checkpoints that cannot be loaded: the message says what and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.base import WorkerConfig
from backends.engine.backend import load_engine
from backends.engine.config import read_model_config
from backends.engine.numerics import choose_dtype
from backends.engine.weights import checkpoint_hash, count_parameters, load_weights
from backends.errors import CheckpointError
from backends.shipped import SHIPPED_MODEL
from backends.tokenizer import Tokenizer


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


DAMAGE = {
    "no config": (remove("config.json"), r"config\.json does not exist"),
    "no weights": (remove("model.safetensors"), r"no weights: .*model\.safetensors"),
    "no tokenizer": (remove("tokenizer.json"), r"no tokenizer: .*tokenizer\.json"),
    "cut config": (truncate("config.json"), r"config\.json"),
    "cut weights": (truncate("model.safetensors"), r"damaged or missing weights .*safetensors"),
    "cut tokenizer": (truncate("tokenizer.json"), r"damaged tokenizer .*tokenizer\.json"),
    "other architecture": (
        edit_config(architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is not supported; supported: LlamaForCausalLM",
    ),
    "scaled rope": (
        edit_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}),
        "'yarn' is not supported",
    ),
    "missing field": (edit_config(hidden_size=None), "config.json.*hidden_size"),
    "odd heads": (edit_config(num_key_value_heads=3), "multiple of num_key_value_heads"),
    "no number of layers": (edit_config(num_hidden_layers=0), "num_hidden_layers: must be at"),
    "rope of text": (edit_config(rope_parameters="long"), "config.json: missing or wrong field"),
    "other activation": (edit_config(hidden_act="gelu"), "'gelu' is not supported"),
    "end token of text": (edit_config(eos_token_id="</s>"), "config.json: eos_token_id must be"),
    "index without a map": (
        lambda directory: (directory / "model.safetensors.index.json").write_text("{}"),
        r"damaged .*index\.json: no weight_map",
    ),
    "template of bytes": (
        lambda directory: (directory / "chat_template.jinja").write_bytes(b"\xff"),
        r"damaged chat template .*chat_template\.jinja",
    ),
    "missing tensor": (
        edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
        r"tensor model\.norm\.weight is missing",
    ),
    "wrong shape": (
        edit_config(intermediate_size=64),
        r"gate_proj\.weight is .* config\.json says",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_explained(name: str, checkpoint_copy: Path) -> None:
    """A missing, cut, foreign or inconsistent file raises one error that names file and fault."""
    damage, message = DAMAGE[name]
    edit = damage
    if name == "cut config":
        (checkpoint_copy / "config.json").write_text('{"architectures": ["Llama')
    else:
        edit(checkpoint_copy)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint_copy)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The path of a missing checkpoint is in the message."""
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        load_weights(tmp_path, read_model_config(tmp_path / "nowhere"), torch.float32)


def test_a_tokenizer_of_another_model_is_refused(checkpoint_copy: Path) -> None:
    """A tokenizer with more tokens than the embedding is named before a prompt can hit one."""
    edit_config(vocab_size=4000)(checkpoint_copy)
    with pytest.raises(CheckpointError, match=r"has 4096 tokens, but config\.json says 4000"):
        load_engine(WorkerConfig(model=str(checkpoint_copy)))


def test_sharded_weights_load_like_one_file(checkpoint_copy: Path) -> None:
    """Shards with an index give the parameters of a single file."""
    single = count_parameters(checkpoint_copy)
    tensors = load_file(checkpoint_copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint_copy / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (checkpoint_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint_copy / "model.safetensors").unlink()
    load(checkpoint_copy)
    assert count_parameters(checkpoint_copy) == single


def test_small_models_compute_in_float32() -> None:
    """`auto` is float32 for the shipped model, and other dtypes go by name."""
    assert choose_dtype("auto", SHIPPED_MODEL) is torch.float32
    assert choose_dtype("bfloat16", SHIPPED_MODEL) is torch.bfloat16
    with pytest.raises(ValueError, match="unknown dtype 'int3'"):
        choose_dtype("int3", SHIPPED_MODEL)


def test_the_checkpoint_hash_follows_the_contents(checkpoint_copy: Path) -> None:
    """Equal files have equal hashes, and a changed weight another one."""
    before = checkpoint_hash(checkpoint_copy)
    assert before == checkpoint_hash(SHIPPED_MODEL)
    edit_weights(lambda tensors: tensors["model.norm.weight"].add_(1))(checkpoint_copy)
    assert checkpoint_hash(checkpoint_copy) != before


def test_the_shipped_models_are_small() -> None:
    """Target and draft together stay under 20 MB."""
    files = [path for path in SHIPPED_MODEL.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6
