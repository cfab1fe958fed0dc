"""Errors of damaged and unsupported LoRA adapters, which name the file and the field or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgate.backends.engine.load_adapters import check_adapters
from draftgate.backends.engine.lora.weights import LoraCheckpoint
from draftgate.backends.errors import CheckpointError
from draftgate.backends.worker_config import WorkerConfig
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import tiny_config

CONFIG = tiny_config()
SHAPES = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(2)
    for module, shape in {
        "self_attn.q_proj": (64, 40),
        "self_attn.v_proj": (32, 40),
        "mlp.down_proj": (40, 56),
    }.items()
}
STORED = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"

FIELDS = [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
    ({"use_dora": True}, "use_dora True is not supported"),
    ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16'"),
    ({"r": 0}, "r must be a whole number from 1"),
    ({"lora_alpha": "high"}, "lora_alpha must be a number"),
    ({"target_modules": []}, "target_modules must name at least one module"),
    ({"target_modules": ["q_proj", "lm_head"]}, "target_modules 'lm_head' is not supported"),
    ({"target_modules": "(q_proj"}, "target_modules has the invalid pattern"),
    ({"target_modules": "vision.*"}, "belongs to no module of the model"),
    ({"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}, "o_proj.lora_A.weight is"),
    ({"layers_to_transform": [0]}, "belongs to no module of the model"),
    ({"rank_pattern": {"q_proj": 2}}, "has shape (4, 40), but the rank of the adapter"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj must be a whole number"),
]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path, SHAPES)
    return tmp_path


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_unsupported_field_is_named(fields: dict[str, object], message: str, adapter: Path) -> None:
    """The error names the file, the field, and what is supported."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(CheckpointError) as caught:
        LoraCheckpoint(adapter, CONFIG)
    assert message in str(caught.value)
    assert str(adapter) in str(caught.value)


def wider(tensors: dict[str, Tensor]) -> None:
    tensors[STORED] = torch.zeros(48, 4)


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors[STORED]


def integers(tensors: dict[str, Tensor]) -> None:
    tensors[STORED] = tensors[STORED].to(torch.int32)


def magnitude(tensors: dict[str, Tensor]) -> None:
    tensors[STORED.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(32)


CHANGES = [
    (wider, f"tensor {STORED} has shape (48, 4), but the rank of the adapter and the base model"),
    (missing, f"tensor {STORED} is missing"),
    (integers, f"tensor {STORED} has dtype I32"),
    (magnitude, "lora_magnitude_vector belongs to no module"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_wrong_tensor_is_named(
    change: Callable[[dict[str, Tensor]], None], message: str, adapter: Path
) -> None:
    """The error names the file and the tensor."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        LoraCheckpoint(adapter, CONFIG)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_damaged_files_are_named(adapter: Path) -> None:
    """An adapter needs its config, and its weights as safetensors."""
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        LoraCheckpoint(adapter, CONFIG)
    path.unlink()
    with pytest.raises(CheckpointError, match="needs its weights as safetensors"):
        LoraCheckpoint(adapter, CONFIG)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json does not exist"):
        LoraCheckpoint(adapter, CONFIG)


def test_gpu_is_refused(adapter: Path) -> None:
    """A worker on a GPU does not start with adapters, and the message names the flag."""
    config = WorkerConfig(loras=(str(adapter),))
    with pytest.raises(ValueError, match="--lora is not supported on a GPU"):
        check_adapters(config, CONFIG, torch.device("cuda"))
    assert len(check_adapters(config, CONFIG, torch.device("cpu")).cards) == 1


def test_files_that_change_after_the_check_are_not_read(adapter: Path) -> None:
    """The digest identifies the content, so other content needs another start."""
    checkpoint = LoraCheckpoint(adapter, CONFIG)
    pairs = [pair for layer in checkpoint.read(torch.float32) for pair in layer]
    assert [None if pair is None else tuple(pair.up.shape) for pair in pairs[:4]] == [
        (128, 16),
        None,
        None,
        (40, 16),
    ]
    write_adapter(adapter, SHAPES, seed=1)
    with pytest.raises(CheckpointError, match="the files have changed"):
        next(checkpoint.read(torch.float32))
    assert LoraCheckpoint(adapter, CONFIG).digest != checkpoint.digest
