"""Random LoRA adapters in the format of PEFT, and models with merged adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.lora.weights import adapted_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    rank_of: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, Tensor]:
    """Write an adapter for some modules, and return its tensors by their names in the model.

    Args:
        shapes: outputs and inputs of each module, by its full name.
        rank_of: returns the rank of a module, if ranks differ.
        config: further fields of the config, or other values.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        own = rank if rank_of is None else rank_of(module)
        for matrix, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            tensors[f"{module}.lora_{matrix}.weight"] = values.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    names = sorted({module.rpartition(".")[2] for module in shapes})
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": names,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return tensors


def write_demo_adapters(directory: Path, **config: Any) -> list[Path]:
    """Write three random adapters of all products of the shipped model, and return their paths."""
    model = read_model_config(SHIPPED_MODEL)
    shapes = {
        module.names[0]: (module.outputs[0], module.inputs)
        for layer in range(model.num_layers)
        for product in adapted_products(model, layer)
        for module in product.each()
    }
    paths = [directory / f"adapter-{seed}" for seed in range(3)]
    for seed, path in enumerate(paths):
        write_adapter(path, shapes, seed=seed, **{"lora_alpha": 2, **config})
    return paths


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in the model."""
    stored = load_file(directory / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items()}


def shapes_of(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the modules of a model whose names end with a target."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if name.endswith(targets) and isinstance(module, torch.nn.Linear)
    }


def merge(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], scale_of: Callable[[str], float]
) -> None:
    """Add `scale * B A` to the weights of a model."""
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    with torch.no_grad():
        for name in modules:
            down, up = (tensors[f"{name}.lora_{matrix}.weight"].float() for matrix in "AB")
            model.get_submodule(name).weight += scale_of(name) * (up @ down)
