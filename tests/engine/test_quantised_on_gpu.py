"""Quantised checkpoints on a GPU, compared with the products of a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_shapes,
    load_weights,
)
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import Setup
from tests.engine.quantised_checkpoints import FORMATS
from tests.engine.tiny_model import (
    MIXED_BLOCKS,
    VOCAB,
    TinyEngine,
    gpu_engine,
    mixed_plans,
    torch_decoder,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

GPU = "cuda:0"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

SAME = 1e-3
FP8_ROWS, FP8_ERROR = 0.5, 0.6
"""Least share of rows within `SAME` in FP8, and largest error of a logit of the others: another
order of sums moves some activations to the next number of FP8, up to 1/8 away."""


def write(form: str, directory: Path) -> Path:
    """Write a random checkpoint in a format, whose LM head is not quantised."""
    quantisation = {**FORMATS[form].config, FORMATS[form].skips: ["lm_head"]}
    config = SHAPE | {"quantization_config": quantisation}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    matrix = (SHAPE["vocab_size"], SHAPE["hidden_size"])
    shapes = {EMBEDDING: matrix, HEAD: matrix, FINAL_NORM: matrix[1:]}
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, shape in (shapes | layer_shapes(read_model_config(directory))).items():
        weight = torch.randn(shape, generator=generator)
        if len(shape) == 1 or name in shapes:
            tensors[name] = weight
        else:
            stored, _ = FORMATS[form].quantise(weight * shape[1] ** -0.5)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def engine_of(directory: Path, dtype: torch.dtype, *, exact: bool = False) -> TinyEngine:
    config = read_model_config(directory)
    weights = load_weights(directory, config, dtype, device=torch.device(GPU), exact=exact)
    return gpu_engine(config, weights, Setup(Off(), num_blocks=MIXED_BLOCKS))


FORMS = [name for name, form in FORMATS.items() if not form.head]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_the_cpu(form: str, captured: bool, tmp_path: Path) -> None:
    """Chunks, decodes, chains and trees have the logits of the CPU's products in every format."""
    config = read_model_config(write(form, tmp_path))
    weights = load_weights(tmp_path, config, torch.float32)
    reference = Runner(torch_decoder(config, weights), KvPool(config, MIXED_BLOCKS, torch.float32))
    engine = engine_of(tmp_path, torch.float32)
    if captured:
        engine.runner.capture()
    found, expected = (
        torch.cat([runner.logits(plan).cpu() for plan in mixed_plans()])
        for runner in (engine.runner, reference)
    )
    errors = (found - expected).abs().amax(1) / expected.std()
    if "fp8" in form:
        assert (errors < SAME).float().mean() >= FP8_ROWS
        assert errors.max() < FP8_ERROR
    else:
        assert errors.max() < SAME


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-channel", "gptq-ordered", "awq"])
def test_rows_have_the_same_bits_alone_and_in_a_batch(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With exact products, a row has the same bits alone and in a batch, captured or not."""
    write(form, tmp_path)
    together, alone = (engine_of(tmp_path, dtype, exact=True) for _ in range(2))
    together.runner.capture()
    for plan in mixed_plans():
        parts = [alone.runner.logits(StepPlan((work,))) for work in plan.work]
        assert torch.equal(together.runner.logits(plan), torch.cat(parts))
