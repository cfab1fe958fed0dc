"""Models whose weights stay packed on a CPU: the same bits in any step, and close to unpacked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators import packed as packed_products
from draftgate.backends.engine.operators.compiler import compiler_version
from draftgate.backends.engine.quantisation import packed as packed_module
from draftgate.backends.engine.quantisation.packed import choose_packing
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.worker_config import WorkerConfig
from tests.engine.eagle_engine import check_head
from tests.engine.gguf_models import converted
from tests.engine.harness import Model
from tests.engine.mixed_batches import at_random
from tests.engine.shipped_proposers import check_shipped_proposers
from tests.engine.step_logits import blocks_of, logits_in_steps
from tests.engine.test_fp8_kv import text
from tests.engine.test_gguf_models import GEMMA, REAL, WIDE, Kind
from tests.engine.test_lossless import PROMPTS, check_all
from tests.engine.test_model_families import random_model_of

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="needs gcc")

TOKENS = 300
BATCHINGS = (
    {"max_num_seqs": 8, "max_step_tokens": 48, "num_blocks": 42},
    {"max_num_seqs": 64, "max_step_tokens": 300},
)


@pytest.fixture(scope="module")
def packed() -> Model:
    """The shipped model, quantised to Q8_0."""
    return Model(SHIPPED_MODEL, packing="q8_0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", ["q8_0", "q4_0"])
def test_chunks_do_not_change_a_bit(packing: Any, dtype: torch.dtype) -> None:
    """A token has the same logits in one step, alone, and in chunks of any size."""
    model = Model(SHIPPED_MODEL, dtype, packing=packing)
    assert model.decoder.padded_rows(1) == 1
    tokens = text(model)
    at_once, *others = (
        logits_in_steps(model.runner(32), blocks_of(0, TOKENS), tokens, edges)
        for edges in ([0, TOKENS], [0, 1, 2, 9, 257, TOKENS], [*range(0, TOKENS + 1, 5)])
    )
    assert all(torch.equal(at_once, other) for other in others)


def test_logits_are_close_to_unpacked_ones(packed: Model, shipped: Model) -> None:
    """Q8_0 changes the logits of the shipped model by a few hundredths of their spread."""
    tokens = text(packed)
    found, expected = (
        logits_in_steps(model.runner(32), blocks_of(0, TOKENS), tokens, [0, TOKENS])
        for model in (packed, shipped)
    )
    assert (found - expected).std() < 0.05 * expected.std()


def test_drafts_of_all_proposers_do_not_change_a_token(packed: Model) -> None:
    """Drafts of every proposer leave the text of `off`, with chunked prompts, cache hits and
    preemptions."""
    check_shipped_proposers(packed, BATCHINGS)


@pytest.mark.long
def test_many_prompts_are_lossless_under_every_policy(
    packed: Model, record_testsuite_property: Any
) -> None:
    """100 prompts generate the same 128 tokens under every policy and batching as with `off`."""
    prompts = random.Random(1).sample(range(PROMPTS), 100)
    check_all(packed, prompts, 1000, record_testsuite_property)


def test_drafts_of_a_head_do_not_change_a_token(packed: Model, tmp_path: Path) -> None:
    """Drafts of an EAGLE-3 head, which reads the packed embedding, leave the text of `off`."""
    check_head(packed, tmp_path, at_random(BATCHINGS), num_prompts=6)


ONE_CALL = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, "num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": 40}),
}
"""Families that together have biases, norms of heads and of results, windows, two rotations, a soft
cap, and GELU."""


def random_decoder(
    family: str, changes: dict[str, Any], directory: Path, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Write a random model, and load it quantised to Q4_0."""
    random_model_of(family, {**WIDE, **changes}).save_pretrained(directory)
    config = read_model_config(directory)
    return Decoder(config, load_weights(directory, config, dtype, packing="q4_0"), 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONE_CALL)
def test_layers_in_one_call_have_the_bits_of_single_operators(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The C code that runs all layers gives the logits of the operators that Python calls."""
    family, changes = ONE_CALL[name]
    decoder = random_decoder(family, changes, tmp_path, dtype)
    tokens = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits() -> Tensor:
        runner = Runner(decoder, KvPool(decoder.config, 16, dtype))
        return logits_in_steps(runner, blocks_of(0, 90), tokens, [0, 50, 51, 52, 57, 90])

    assert decoder._packed_layers is not None
    in_one_call = logits()
    decoder._packed_layers = None
    assert torch.equal(in_one_call, logits())


def test_experts_and_unpacked_matrices_run_as_single_operators(tmp_path: Path) -> None:
    """A packed mixture of experts and a model with an unpacked matrix are computed, too."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    for family, changes in (("mixtral", experts), ("llama", {"intermediate_size": 112})):
        decoder = random_decoder(family, changes, tmp_path / family)
        assert decoder._packed_layers is None


def loaded(**settings: Any) -> LoadedEngine:
    """Load the shipped model, so that a step has a measured cost."""
    settings = {"device": "cpu", "threads": 1, "max_model_len": 512, "kv_bytes": 4 << 20} | settings
    return load_engine(WorkerConfig(**settings))


def test_workers_with_packed_weights_are_exact_and_of_their_own_class() -> None:
    """Packed workers promise exact bits in any dtype, and share no class with unpacked ones."""
    cards = {
        name: loaded(quantization=name, dtype=dtype).served.card
        for name, dtype in (("none", "float32"), ("q8_0", "bfloat16"), ("q4_0", "auto"))
    }
    assert all(card.capabilities.exact for card in cards.values())
    classes = {name: card.numerics_class for name, card in cards.items()}
    assert "-q8_0/" in classes["q8_0"]
    assert "-q4_0-q8_0/" in classes["q4_0"]
    assert "/float32/" in classes["q4_0"]
    assert "q8_0" not in classes["none"]


def test_every_row_of_a_packed_step_has_a_price() -> None:
    """Without padding, the cost of a step is measured for each of the first rows."""
    costs = {
        name: loaded(quantization=name, dtype="float32").worker._scheduler.cost.token_buckets
        for name in ("none", "q8_0")
    }
    assert costs["q8_0"][:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert costs["none"][0] > 1


def test_quantization_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name, a GPU and a machine without gcc are reported."""
    checkpoint = Checkpoint(SHIPPED_MODEL)
    assert choose_packing("auto", checkpoint, "cpu", torch.float32) is None
    assert choose_packing("auto", checkpoint, "cuda", torch.float32) is None
    with pytest.raises(ValueError, match="unknown quantization 'q3'; known: auto, none"):
        choose_packing("q3", checkpoint, "cpu", torch.float32)
    with pytest.raises(ValueError, match="--quantization q8_0 needs --device cpu"):
        choose_packing("q8_0", checkpoint, "cuda", torch.float32)
    monkeypatch.setattr(packed_module, "multiplies_packed", lambda _kind, _dtype: False)
    with pytest.raises(ValueError, match="--quantization q4_0 needs gcc"):
        choose_packing("q4_0", checkpoint, "cpu", torch.float32)


def written(tmp_path: Path, kind: Kind) -> Path:
    """Write a random Llama model as a GGUF file with blocks of a type, and return its folder."""
    random_model_of("llama", WIDE).save_pretrained(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf", kind)
    return settings_folder(tmp_path / "model.gguf", tmp_path / "cache")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_blocks_of_a_file_stay_packed(kind: Kind, tmp_path: Path) -> None:
    """A model multiplies the blocks of its file: bits do not depend on the step, and logits are
    close to those of the unpacked weights."""
    folder = written(tmp_path, kind)
    packed, unpacked = (Model(folder, packing=packing) for packing in ("stored", None))
    assert kind.name.lower() in packed.decoder.arithmetic
    tokens = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    at_once, chunks, expected = (
        logits_in_steps(model.runner(16), blocks_of(0, 70), tokens, edges)
        for model, edges in (
            (packed, [0, 70]),
            (packed, [0, 1, 2, 11, *range(60, 71)]),
            (unpacked, [0, 70]),
        )
    )
    assert torch.equal(at_once, chunks)
    assert (at_once - expected).std() < 0.05 * expected.std()


def test_workers_keep_blocks_packed_unless_told_otherwise(tmp_path: Path) -> None:
    """`auto` and `stored` keep the blocks of a file packed on a CPU, and `none` unpacks them."""
    checkpoint = Checkpoint(written(tmp_path, Kind.Q4_0))
    assert choose_packing("auto", checkpoint, "cpu", torch.float32) == "stored"
    assert choose_packing("stored", checkpoint, "cpu", torch.float32) == "stored"
    assert choose_packing("none", checkpoint, "cpu", torch.float32) is None
    assert choose_packing("auto", checkpoint, "cuda", torch.float32) is None


def test_stored_blocks_never_unpack_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `auto` unpacks blocks, `stored` is an error. A draft model without blocks is not."""
    checkpoint = Checkpoint(written(tmp_path, Kind.Q4_0))
    with pytest.raises(ValueError, match="--quantization stored needs --device cpu"):
        choose_packing("stored", checkpoint, "cuda", torch.float32)
    monkeypatch.setattr(packed_module, "multiplies_packed", lambda _kind, _dtype: False)
    assert choose_packing("auto", checkpoint, "cpu", torch.float32) is None
    with pytest.raises(ValueError, match="--quantization stored needs gcc"):
        choose_packing("stored", checkpoint, "cpu", torch.float32)
    assert choose_packing("stored", Checkpoint(SHIPPED_MODEL), "cpu", torch.float32) is None


def test_products_are_those_of_the_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stay packed only if C can multiply them by rows of the dtype that the model uses."""
    checkpoint = Checkpoint(written(tmp_path, Kind.Q4_0))
    real = packed_products._library
    monkeypatch.setattr(
        packed_products,
        "_library",
        lambda number, *, rounds: None if rounds else real(number, rounds=rounds),
    )
    assert choose_packing("auto", checkpoint, "cpu", torch.float32) == "stored"
    assert choose_packing("auto", checkpoint, "cpu", torch.bfloat16) is None


@pytest.mark.parametrize("file", ["smollm2-q4_1.gguf", "gemma3-270m-q4_k_m.gguf"])
def test_perplexity_of_real_models_is_that_of_their_unpacked_weights(
    file: str, tmp_path: Path
) -> None:
    """Rounding activations to int8 changes the perplexity of a text by less than 1%."""
    if not (REAL / file).is_file():
        pytest.skip("no real models")
    folder = settings_folder(REAL / file, tmp_path)
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    losses = []
    for packing in ("stored", None):
        model = Model(folder, packing=packing)
        tokens = model.tokenizer.encode(text)[:512]
        steps = [*range(0, len(tokens), 128), len(tokens)]
        logits = logits_in_steps(model.runner(40), blocks_of(0, 512), tokens, steps)
        losses.append(cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item())
    assert abs(losses[0] - losses[1]) < 0.01
