"""EAGLE-3 heads on disk: published layouts, and errors of damaged and unsupported heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.eagle.config import is_head, read_head_config
from draftgate.backends.engine.kv_pool import Features, KvPool, num_blocks_for
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.errors import CheckpointError
from draftgate.backends.worker_config import WorkerConfig
from tests.engine.eagle_engine import (
    BLOCKS,
    TappedEngine,
    computed_sequence,
    eagle_proposer,
    load_head,
)
from tests.engine.eagle_heads import write_head
from tests.engine.harness import Model, Setup


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with random weights."""
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture
def tapped(shipped: Model) -> Iterator[Model]:
    """The shipped model, whose taps are removed after the test."""
    yield shipped
    shipped.decoder.taps = None


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_features_count_as_memory_of_blocks(dtype: torch.dtype) -> None:
    """A pool with features has as many blocks as fit with them, and keeps their bits."""
    config = read_model_config(SHIPPED_MODEL)
    for width in (256, 40):
        sizes = Features(width, torch.float32)
        blocks = num_blocks_for(config, 1 << 20, dtype, sizes)
        pool = KvPool(config, blocks, dtype, features=sizes)
        assert blocks * pool.block_bytes <= 1 << 20 < (blocks + 1) * pool.block_bytes
        features = torch.randn(3, width)
        pool.write_features(torch.tensor([5, 1, 30]), features)
        assert torch.equal(pool.read_features(torch.tensor([1, 30, 5])), features[[1, 2, 0]])


def test_worker_with_a_head_serves_it_as_proposer(directory: Path) -> None:
    """`--draft-model` with a head offers `eagle`, and blocks go only to workers with this head."""
    config = WorkerConfig(device="cpu", draft_model=str(directory), kv_bytes=8 << 20)
    engine = load_engine(config)
    assert tuple(engine.proposers)[:2] == ("ngram", "eagle")
    assert "draft_model" not in engine.proposers
    form = engine.served.card.kv_format
    assert form.strips == 48 + 8
    assert form.numerics_class.startswith(engine.served.card.numerics_class)
    assert form.numerics_class != engine.served.card.numerics_class


@pytest.mark.parametrize(
    ("proposer", "message"),
    [
        ("draft_model", "the proposer draft_model needs a draft model: --draft-model"),
        ("eagle", "the proposer eagle needs an EAGLE-3 head: --draft-model"),
    ],
)
def test_proposer_without_its_kind_of_draft_model_is_rejected(
    directory: Path, proposer: str, message: str
) -> None:
    """A head is no draft model, and the shipped draft model is no head."""
    draft = str(directory) if proposer == "draft_model" else None
    with pytest.raises(ValueError, match=message):
        load_engine(WorkerConfig(device="cpu", draft_model=draft, proposer=proposer))


def renamed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Change a head into the layout of vLLM's speculators, with an embedding of its own."""
    layer = {key: config.pop(key) for key in list(config) if key != "draft_vocab_size"}
    layer.pop("architectures")
    config |= {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        "norm_before_residual": False,
    }
    for name in list(tensors):
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    tensors["embed_tokens.weight"] = load_file(SHIPPED_MODEL / "model.safetensors")[
        "model.embed_tokens.weight"
    ].float()


def test_published_layouts_load_alike(tapped: Model, tmp_path: Path, directory: Path) -> None:
    """A head drafts the same tokens in the layouts of SGLang and of vLLM's speculators."""
    other = write_head(tmp_path, renamed)
    assert is_head(other)
    assert read_head_config(other).taps == (1, 2, 5)
    drafts = []
    for path in (directory, other):
        head = load_head(path, tapped)
        head.config = replace(head.config, taps=(2, 3, 4))
        engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), head)
        token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=50, most=50)[0])
        sequence = computed_sequence(engine, token_ids)
        drafts += eagle_proposer(engine).propose([DraftRequest(sequence, 3)])
    assert drafts[0].token_ids == drafts[1].token_ids


def test_absent_fields_have_the_defaults_of_their_layout(tmp_path: Path) -> None:
    """Heads of speculators add to the normalised hidden state, and the authors' heads have one
    layer whatever their config says."""

    def speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        renamed(config, tensors)
        del config["norm_before_residual"]

    def authors(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config.update(architectures=["LlamaForCausalLM"], num_hidden_layers=40)

    assert read_head_config(write_head(tmp_path / "a", speculators)).norm_before_residual
    head = write_head(tmp_path / "b", authors)
    assert is_head(head)
    assert not read_head_config(head).norm_before_residual
    assert read_head_config(head).model.num_layers == 1


def setting(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, _tensors: config.update(changes)


def tensor(name: str, value: Callable[[Tensor], Tensor | None]) -> Any:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        found = value(tensors.pop(name))
        if found is not None:
            tensors[name] = found

    return change


def extra(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.fc_norm.weight"] = torch.ones(256)


IDS = "eagle_aux_hidden_state_layer_ids"

FAULTS: dict[str, tuple[Any, str]] = {
    "two layers": (setting(num_hidden_layers=2), "num_hidden_layers 2 is not supported"),
    "other family": (
        setting(model_type="deepseek_v3"),
        "model_type 'deepseek_v3' is not supported",
    ),
    "no taps": (setting(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    "two taps": (setting(**{IDS: [1, 2]}), f"{IDS} must list 3 layers"),
    "deep tap": (
        setting(eagle_config={IDS: [1, 2, 6]}),
        "taps the layers .2, 3, 7., but the model",
    ),
    "other width": (
        setting(target_hidden_size=128),
        "hidden_size 128 differs from the model's, 256",
    ),
    "other vocabulary": (
        setting(vocab_size=5000),
        "vocab_size 5000 differs from the model's, 4096",
    ),
    "missing": (tensor("fc.weight", lambda _: None), "tensor fc.weight is missing"),
    "shape": (
        tensor("fc.weight", lambda t: t[:, :-1].clone()),
        r"fc.weight has shape \(256, 767\)",
    ),
    "unknown": (extra, "tensor layers.0.fc_norm.weight is not supported"),
    "no table": (tensor("d2t", lambda _: None), "lacks the tensor d2t"),
    "outside": (tensor("d2t", lambda t: t + 4000), "d2t must name different tokens"),
    "twice": (tensor("d2t", lambda t: -torch.arange(len(t))), "d2t must name different tokens"),
    "floats": (tensor("d2t", Tensor.float), "d2t must be 1500 integers"),
    "contradiction": (tensor("t2d", Tensor.logical_not), "t2d must mark the tokens of d2t"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_and_unsupported_heads_are_named(
    shipped: Model, tmp_path: Path, fault: str
) -> None:
    """The error names the file or tensor, and what was expected."""
    change, message = FAULTS[fault]
    directory = write_head(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_head(directory, shipped)


def test_head_in_pickled_files_is_named(shipped: Model, tmp_path: Path) -> None:
    """The error says how to convert a head that was published as `pytorch_model.bin`."""
    directory = write_head(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only \*.bin files; convert them"):
        load_head(directory, shipped)
