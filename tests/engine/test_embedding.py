"""Embeddings: the last hidden state, whose bits do not depend on the batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.pooling import unsupported_pooling
from draftgate.backends.errors import CheckpointError, RequestRejected
from draftgate.backends.types import FinishReason, GenerationRequest, Task
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import Engine, Model, Setup, embedding_request, request
from tests.engine.step_logits import blocks_of, logits_in_steps, runner_of
from tests.engine.test_model_families import random_model

MODEL = Model(SHIPPED_MODEL)
DEFAULT = Setup()
RNG = random.Random(8)
TEXTS = [
    [RNG.randrange(MODEL.tokenizer.vocab_size) for _ in range(length)]
    for length in (1, 2, 15, 16, 17, 40, 150, 300)
]


def embeddings(
    requests: Iterable[GenerationRequest], setup: Setup = DEFAULT, model: Model = MODEL
) -> tuple[dict[str, bytes], Engine, int]:
    """Run requests and return the embeddings, the engine and the number of preemptions."""
    engine = Engine(model, setup)
    worker = engine.worker
    for each in requests:
        worker.admission.check(each)
        worker.submit(each)
    waiting = engine.scheduler.waiting
    found = {
        request_id: delta.pooled
        for step in run_until_idle(worker, engine.runner)
        for request_id, delta in step.deltas
        if delta.pooled is not None
    }
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return found, engine, sum(sequence.preemptions for sequence in waiting)


@pytest.fixture(scope="module")
def alone() -> dict[str, bytes]:
    """Embed each text in one step on a new worker."""
    found = {}
    for index, tokens in enumerate(TEXTS):
        found |= embeddings([embedding_request(f"e{index}", tokens)])[0]
    return found


def embedding_requests() -> list[GenerationRequest]:
    return [embedding_request(f"e{index}", tokens) for index, tokens in enumerate(TEXTS)]


def generating_requests(count: int, **sampling: object) -> list[GenerationRequest]:
    """Create generating requests with drafts, whose prompts share prefixes with the texts."""
    policy = speculation_policy("fixed:3")
    return [
        request(f"g{index}", TEXTS[-1 - index % 3][: 50 + index], policy, seed=index, **sampling)
        for index in range(count)
    ]


@pytest.mark.parametrize("max_step_tokens", [16, 47, 512])
def test_embedding_bits_do_not_depend_on_the_batch(
    alone: dict[str, bytes], max_step_tokens: int
) -> None:
    """An embedding has the same bits in any batch and in chunks of any size."""
    setup = Setup(speculation_policy("fixed:3"), max_step_tokens=max_step_tokens)
    mixed = [
        each
        for pair in zip(generating_requests(8, max_tokens=40), embedding_requests(), strict=True)
        for each in pair
    ]
    assert embeddings(mixed, setup)[0] == alone


def test_embedding_bits_do_not_depend_on_the_prefix_cache(alone: dict[str, bytes]) -> None:
    """A text with a cached prefix has the same bits as a text without a cached prefix."""
    engine = Engine(MODEL, Setup())
    worker = engine.worker
    for warm in (
        request("warm", TEXTS[-1], Off(), max_tokens=2),
        embedding_request("e7", TEXTS[-1]),
    ):
        worker.submit(warm)
        deltas = [
            delta for step in run_until_idle(worker, engine.runner) for _, delta in step.deltas
        ]
    assert [delta.pooled for delta in deltas] == [alone["e7"]]
    assert deltas[0].cached_tokens == 288
    assert deltas[0].finish_reason is FinishReason.STOP


def test_embedding_bits_survive_a_preemption(alone: dict[str, bytes]) -> None:
    """The engine recomputes a preempted text to an embedding with the same bits."""
    setup = Setup(max_step_tokens=24, num_blocks=30)
    mixed = [*generating_requests(4, max_tokens=120), *embedding_requests()]
    found, _, preemptions = embeddings(mixed, setup)
    assert preemptions > 0
    assert found == alone


def test_generation_does_not_depend_on_embeddings() -> None:
    """Generated tokens are the same with and without embedding requests in the batch."""

    def tokens(other_requests: list[GenerationRequest]) -> dict[str, list[int]]:
        engine = Engine(MODEL, Setup(speculation_policy("fixed:3"), max_step_tokens=64))
        worker = engine.worker
        for each in (*generating_requests(3, max_tokens=30), *other_requests):
            worker.submit(each)
        tokens_by_request: dict[str, list[int]] = {}
        for step in run_until_idle(worker, engine.runner):
            for request_id, delta in step.deltas:
                tokens_by_request.setdefault(request_id, []).extend(delta.token_ids)
        return {name: ids for name, ids in tokens_by_request.items() if name.startswith("g")}

    assert tokens(embedding_requests()) == tokens([])


def vector(embedding: bytes) -> np.ndarray:
    return np.frombuffer(embedding, "<f4")


def expected(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Return the last hidden state of the last token, computed by transformers."""
    from transformers import AutoModel

    oracle = AutoModel.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        state: torch.Tensor = oracle(torch.tensor([tokens])).last_hidden_state[0, -1]
    return state


class AnyTokenizer:
    """A stand-in for a missing tokenizer."""

    vocab_size = 300
    texts = ("x",) * 300

    def decode(self, token_ids: Iterable[int]) -> str:
        return "x" * len(list(token_ids))


class RandomModel(Model):
    """A random checkpoint without a tokenizer."""

    def __post_init__(self) -> None:
        runner = runner_of(self.directory)
        self.config, self.decoder = runner._decoder.config, runner._decoder
        self.tokenizer = AnyTokenizer()


@pytest.mark.parametrize(
    "variant",
    ["gemma3", "llama-yarn", "mistral-windows", "phi3", "qwen2", "qwen3-moe", "qwen3-tied"],
)
def test_embeddings_of_random_models_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Chunked float32 embeddings are within 1e-4 of `last_hidden_state` at the last token."""
    random_model(variant).save_pretrained(tmp_path)
    tokens = [RNG.randrange(300) for _ in range(150)]
    each, setup = [embedding_request("one", tokens)], Setup(max_step_tokens=33)
    found = vector(embeddings(each, setup, RandomModel(tmp_path))[0]["one"])
    assert np.abs(found - expected(tmp_path, tokens).numpy()).max() < 1e-4


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_embeddings_of_the_shipped_model_equal_transformers(
    index: int, alone: dict[str, bytes]
) -> None:
    """Embeddings of texts of any length are within 1e-4 of transformers."""
    found = vector(alone[f"e{index}"])
    assert found.shape == (MODEL.config.hidden_size,)
    assert np.abs(found - expected(SHIPPED_MODEL, TEXTS[index]).numpy()).max() < 1e-4


def test_checkpoint_without_a_head_is_the_same_model(tmp_path: Path) -> None:
    """The loader reads tensors without the prefix `model.`, as in Qwen3-Embedding, as decoder
    tensors."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    random_model("qwen3-tied").save_pretrained(whole)
    bare.mkdir()
    (bare / "config.json").write_text((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    stripped = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert stripped.keys().isdisjoint(tensors)
    save_file(stripped, bare / "model.safetensors")
    logits = [
        logits_in_steps(runner_of(directory), blocks_of(0, 40), TEXTS_SMALL, [0, 40])
        for directory in (whole, bare)
    ]
    assert torch.equal(*logits)


TEXTS_SMALL = [token % 300 for token in TEXTS[5]]

LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        (None, None, None),
        (MODULES, LAST, None),
        (MODULES, {"pooling_mode": "lasttoken"}, None),
        (None, MEAN, "requires pooling by mean_tokens"),
        (MODULES, {**LAST, "pooling_mode_cls_token": True}, "by cls_token and lasttoken"),
        (MODULES, {"pooling_mode": "max"}, "requires pooling by max"),
        (MODULES, {"include_prompt": True}, "requires pooling by mean_tokens"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], LAST, "module 'Dense'"),
    ],
)
def test_only_last_token_pooling_is_supported(
    modules: object, pooling: object, reason: str | None, tmp_path: Path
) -> None:
    """The engine rejects a checkpoint with another pooling method, and the error names this
    method."""
    for name, value in (("modules.json", modules), ("1_Pooling/config.json", pooling)):
        if value is not None:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(value))
    found = unsupported_pooling(tmp_path)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


@pytest.mark.parametrize("damage", ["{", "{}", "[1]"])
def test_damaged_modules_file_is_named(damage: str, tmp_path: Path) -> None:
    """If the list of modules has another format, the loader raises an error that names the file."""
    (tmp_path / "modules.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"damaged .*modules\.json"):
        unsupported_pooling(tmp_path)


CONFIG = WorkerConfig(max_model_len=512, kv_bytes=4 << 20, threads=1)


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
async def test_backend_streams_an_embedding_as_one_delta(
    own_process: bool, alone: dict[str, bytes]
) -> None:
    """The backend streams an embedding with the same bytes from a thread and from a separate
    process."""
    backend = EngineBackend(structs.replace(CONFIG, own_process=own_process))
    await backend.start()
    try:
        capabilities = backend.card.capabilities
        assert capabilities.tasks == (Task.GENERATE, Task.EMBED)
        assert capabilities.embedding_size * 4 == len(alone["e5"])
        deltas = [delta async for delta in generate(backend, embedding_request("e5", TEXTS[5]))]
        assert [delta.pooled for delta in deltas] == [alone["e5"]]
        assert (deltas[0].token_ids, deltas[0].outcome) == ((), None)
    finally:
        await backend.stop()


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
async def test_checkpoint_with_another_pooling_only_generates(
    own_process: bool, tmp_path: Path
) -> None:
    """A checkpoint with another pooling loads, declares no embeddings and rejects embedding
    requests."""
    for file in SHIPPED_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(MEAN))
    backend = EngineBackend(structs.replace(CONFIG, model=str(tmp_path), own_process=own_process))
    await backend.start()
    try:
        assert backend.card.capabilities.tasks == (Task.GENERATE,)
        with pytest.raises(RequestRejected, match="does not embed texts"):
            backend.check(embedding_request("e", [1, 2]))
    finally:
        await backend.stop()
