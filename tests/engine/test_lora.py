"""LoRA adapters in the engine, compared with merged weights and with requests that run alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.linear import MAX_ROWS, MIN_ROWS
from draftgate.backends.engine.lora.products import (
    ADAPTED_ROWS,
    CpuAdapters,
    LowRankProduct,
    multiplies_exactly,
)
from draftgate.backends.engine.lora.weights import LoraCheckpoint, LowRank
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.errors import CheckpointError
from tests.engine.quantised_checkpoints import FORMATS, write_quantised
from tests.engine.random_adapters import ALL, merge, shapes_of, write_adapter
from tests.engine.step_logits import blocks_of, logits_in_steps, work
from tests.engine.test_exactness import cancelling
from tests.engine.test_model_families import random_model

TOKENS = 90
STEPS = [0, 1, 2, 40, 45, TOKENS]


def tokens() -> Tensor:
    return torch.randint(0, 300, (TOKENS,), generator=torch.Generator().manual_seed(1))


def runner_with(
    directory: Path, adapters: list[Path], dtype: torch.dtype = torch.float32
) -> Runner:
    """Load a model with adapters in the slots from 1 on."""
    config = read_model_config(directory)
    exact = dtype is not torch.float32
    cpu = CpuAdapters(load_weights(directory, config, dtype, exact=exact), exact=exact)
    for slot, adapter in enumerate(adapters, 1):
        cpu.install(slot, cpu.prepare(LoraCheckpoint(adapter, config).read(dtype)))
    decoder = Decoder(config, cpu.weights, 2048, cpu)
    return Runner(decoder, KvPool(config, 256, dtype))


def logits_of(runner: Runner, slot: int, steps: list[int] = STEPS) -> Tensor:
    table = blocks_of(0, TOKENS)
    table.adapter_slot = slot
    return logits_in_steps(runner, table, tokens().tolist(), steps)


CASES = {
    "all": ("llama", ALL, {}),
    "all-linear": ("qwen3", ALL, {"target_modules": "all-linear"}),
    "attention": ("llama-wide-heads", ("q_proj", "v_proj"), {"lora_alpha": 3}),
    "pattern": ("qwen2", ("k_proj", "up_proj"), {"target_modules": r".*\.(k|up)_proj"}),
    "rank-stabilised": ("mistral-windows", ALL, {"use_rslora": True, "lora_alpha": 4}),
    "fused": ("phi3", ("qkv_proj", "o_proj", "gate_up_proj"), {}),
    "gemma": ("gemma3", ALL, {}),
    "experts": ("qwen3-moe", ALL[:4], {}),
    "patterns": (
        "llama",
        ALL,
        {"rank_pattern": {"k_proj": 6, "layers.1.mlp.*": 3}, "alpha_pattern": {"^.*up_proj": 5}},
    ),
}


def rank_of(case: str) -> Callable[[str], int] | None:
    if case != "patterns":
        return None
    return lambda module: 6 if "k_proj" in module else 3 if "1.mlp" in module else 4


def scale_of(case: str, config: dict[str, object]) -> Callable[[str], float]:
    alpha = config.get("lora_alpha", 8)

    def scale(module: str) -> float:
        if case == "patterns":
            return (5 if "up_proj" in module else 8) / rank_of(case)(module)
        return alpha / (2.0 if config.get("use_rslora") else 4.0)

    return scale


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    """Logits in float32 agree with a model whose weights include the adapter, and rows without
    the adapter keep the bits of the model."""
    variant, targets, changes = CASES[case]
    model = random_model(variant)
    model.save_pretrained(tmp_path / "model")
    tensors = write_adapter(
        tmp_path / "adapter", shapes_of(model, targets), rank_of=rank_of(case), **changes
    )
    runner = runner_with(tmp_path / "model", [tmp_path / "adapter"])
    plain = runner_with(tmp_path / "model", [])
    assert torch.equal(logits_of(runner, 0), logits_of(plain, 0))
    merge(model, tensors, scale_of(case, changes))
    with torch.no_grad():
        expected = model(tokens()[None]).logits[0]
    found = logits_of(runner, 1)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits_of(plain, 0)).abs().max() > 0.1


def test_adapters_add_to_quantised_weights(tmp_path: Path) -> None:
    """Logits agree with a model whose weights are those of the quantised checkpoint and the
    adapter."""
    (tmp_path / "model").mkdir()
    model = write_quantised(random_model("qwen2"), tmp_path / "model", FORMATS["awq"])
    tensors = write_adapter(tmp_path / "adapter", shapes_of(model, ALL))
    runner = runner_with(tmp_path / "model", [tmp_path / "adapter"])
    merge(model, tensors, lambda _module: 2.0)
    with torch.no_grad():
        expected = model(tokens()[None]).logits[0]
    assert (logits_of(runner, 1) - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Return a random Qwen2 and two adapters of different modules and ranks."""
    directory = tmp_path_factory.mktemp("adapted")
    model = random_model("qwen2")
    model.save_pretrained(directory / "model")
    write_adapter(directory / "first", shapes_of(model, ALL), seed=1)
    write_adapter(directory / "second", shapes_of(model, ALL[1:5]), rank=3, seed=2)
    return directory / "model", [directory / "first", directory / "second"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 16, 192), (144, 32, 64), (33, 16, 40), (2048, 48, 301)])
def test_a_row_of_a_low_rank_product_does_not_depend_on_the_number_of_rows(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The terms cancel, so another order of additions would change every number."""
    inputs, rank, outputs = shape
    x, down = cancelling(MAX_ROWS, inputs, rank, dtype)
    up = torch.randn(outputs, rank, generator=torch.Generator().manual_seed(3)).to(dtype)
    product = LowRankProduct(LowRank(down, up), exact=True)
    alone = torch.cat([product(tile) for tile in x.split(MIN_ROWS)])
    assert alone.any()
    for rows in ADAPTED_ROWS:
        assert torch.equal(product(x[:rows]), alone[:rows])
        assert torch.equal(product(x[-rows:]), alone[-rows:])


class Inexact(LowRankProduct):
    """A product whose rows depend on their number, like one that splits its sums."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1.0 + 1e-6 * len(x))


def test_inexact_products_are_refused_only_by_exact_workers(
    adapted: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of an adapter tests its products on the machine."""
    pair = LowRank(torch.randn(16, 64), torch.randn(40, 16))
    assert multiplies_exactly(LowRankProduct(pair, exact=False), torch.float32)
    assert not multiplies_exactly(Inexact(pair, exact=False), torch.float32)
    directory, adapters = adapted
    config = read_model_config(directory)
    cpu = CpuAdapters(load_weights(directory, config, torch.float32), exact=False)
    layers = list(LoraCheckpoint(adapters[0], config).read(torch.float32))
    monkeypatch.setattr("draftgate.backends.engine.lora.products.LowRankProduct", Inexact)
    with pytest.raises(CheckpointError, match="depend on the rest of a step"):
        cpu.prepare(layers, exact=True)
    cpu.prepare(layers, exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_other_adapters_change_no_bit(
    dtype: torch.dtype, adapted: tuple[Path, list[Path]]
) -> None:
    """A step of the model alone, of two adapters, and of drafts gives each row the bits that it has
    alone, token by token, and in chunks."""
    runner, text = runner_with(*adapted, dtype), tokens().tolist()
    expected = [logits_of(runner, slot, [*range(20), TOKENS]) for slot in (0, 1, 2)]
    for slot in (0, 1, 2):
        assert torch.equal(logits_of(runner, slot), expected[slot])
    assert not any(torch.equal(expected[0], expected[slot]) for slot in (1, 2))
    tables = [blocks_of(index, TOKENS) for index in range(5)]
    slots, found = (1, 0, 2, 1, 0), [list[Tensor]() for _ in range(5)]
    for table, slot in zip(tables, slots, strict=True):
        table.adapter_slot = slot
    for begin, end in pairwise([0, 1, 5, 30, 31, TOKENS]):
        plan = StepPlan(tuple(work(table, text, begin, end) for table in tables))
        for logits, of_table in zip(runner.logits(plan).split(end - begin), found, strict=True):
            of_table.append(logits)
    for slot, of_table in zip(slots, found, strict=True):
        assert torch.equal(torch.cat(of_table), expected[slot])
