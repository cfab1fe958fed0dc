"""The loading of a checkpoint: memory, progress, file access and the hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.models import random_checkpoint
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine import checkpoint, weights
from draftgate.backends.engine.checkpoint import HASH_PIECE_BYTES, Checkpoint, checkpoint_hash
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.errors import CheckpointError
from tests.engine.load_apart import load_apart
from tests.engine.step_logits import blocks_of, logits_in_steps, runner_of

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


READS_PROC = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs /proc of Linux"
)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 155 MB in bfloat16."""
    return random_checkpoint(tmp_path_factory.mktemp("untied"), vocab_size=16000, **LARGE)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 164 MB in bfloat16, with a quarter of its size in the embedding."""
    directory = tmp_path_factory.mktemp("tied")
    return random_checkpoint(directory, vocab_size=40000, tie_word_embeddings=True, **LARGE)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path, **SMALL)


@READS_PROC
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param("untied", "float32", marks=pytest.mark.long), ("tied", "bfloat16")],
)
def test_loading_needs_little_more_memory_than_the_weights(
    kind: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """The peak memory of loading is at most 1.15 times the size of the weights."""
    measured = load_apart(request.getfixturevalue(kind), dtype)
    assert measured["weight_bytes"] > 150e6
    assert measured["weight_bytes"] <= measured["peak_bytes"] <= 1.15 * measured["weight_bytes"]


def test_progress_rises_to_1(small: Path) -> None:
    """The loaded fraction of the bytes rises with every tensor and ends at exactly 1."""
    shares: list[float] = []
    config = read_model_config(small)
    load_weights(small, config, torch.float32, progress=shares.append)
    assert len(shares) == 3 + config.num_layers * 9
    assert shares[0] > 0
    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0


@READS_PROC
def test_each_file_is_opened_at_most_once_per_layer(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader opens each shard at most once per layer and closes every file."""
    opened: list[Path] = []
    open_file = checkpoint._open

    def counting(path: Path):
        opened.append(path)
        return open_file(path)

    monkeypatch.setattr(checkpoint, "_open", counting)
    config = read_model_config(small)
    load_weights(small, config, torch.float32)
    shards = len(list(small.glob("*.safetensors")))
    matrices_and_norm = 3
    assert len(opened) <= shards * (1 + config.num_layers) + matrices_and_norm
    mapped_files = {
        name.split(" ")[-1] for name in Path("/proc/self/maps").read_text().splitlines()
    }
    assert not {str(path) for path in small.glob("*.safetensors")} & mapped_files


def test_missing_tensors_are_reported_before_reading(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reports a missing tensor of the last layer before it reads any tensor."""
    config = read_model_config(small)

    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint.TensorReader, "read", read)
    stored = checkpoint._stored_tensors
    monkeypatch.setattr(
        checkpoint,
        "_stored_tensors",
        lambda directory: {
            name: tensor
            for name, tensor in stored(directory).items()
            if name != "model.layers.2.mlp.down_proj.weight"
        },
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.down_proj\.weight"):
        load_weights(small, config, torch.float32)


def test_a_file_truncated_during_loading_is_an_error(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is truncated during loading raises an error with its name."""
    config = read_model_config(small)
    require = weights.require_weights

    def require_then_cut(*args: Any) -> int:
        num_bytes = require(*args)
        for path in small.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1000])
        return num_bytes

    monkeypatch.setattr(weights, "require_weights", require_then_cut)
    with pytest.raises(CheckpointError, match=r"damaged or missing weights .*model-0000\d-of"):
        load_weights(small, config, torch.float32)


def test_a_tied_embedding_has_the_same_bits_with_and_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An LM head that shares the embedding's memory has the same logits, bit for bit, as a packed
    copy."""
    tokens = torch.randint(0, 4096, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    read = []
    for most_bytes in (0, 1 << 30):
        monkeypatch.setattr(weights, "TIED_COPY_BYTES", most_bytes)
        runner = runner_of(SHIPPED_MODEL)
        read.append(logits_in_steps(runner, blocks_of(0, 40), tokens, [0, 7, 40]))
    assert torch.equal(*read)


def test_the_hash_follows_its_definition(small: Path) -> None:
    """The checkpoint hash equals a hash computed from its definition."""
    large = small / "model-00001-of-00002.safetensors"
    with large.open("r+b") as file:
        file.truncate(HASH_PIECE_BYTES + 5)
    digest = hashlib.sha256()
    for path in [small / "config.json", *sorted(small.glob("*.safetensors"))]:
        content = path.read_bytes()
        for begin in range(0, len(content), HASH_PIECE_BYTES):
            digest.update(hashlib.sha256(content[begin : begin + HASH_PIECE_BYTES]).digest())
    assert checkpoint_hash(small) == digest.hexdigest()[:12]


def test_loading_reports_the_hash(small: Path) -> None:
    """Loaded weights have the hash of their checkpoint."""
    loaded = load_weights(small, read_model_config(small), torch.float32)
    assert loaded.checkpoint_hash == checkpoint_hash(small)


def test_parameters_are_counted_from_the_headers(untied: Path, tied: Path) -> None:
    """The number of parameters counts the stored tensors, with tied tensors counted once."""
    layer = 512 * (2 * 512 + 2 * 128 + 3 * 1792 + 2)
    assert Checkpoint(untied).num_parameters == 18 * layer + 512 + 2 * 16000 * 512
    assert Checkpoint(tied).num_parameters == 18 * layer + 512 + 40000 * 512
