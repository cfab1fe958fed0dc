"""Cross-encoders: scores equal those of transformers and sentence-transformers, in any batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.errors import CheckpointError, RequestRejected
from draftgate.backends.pair_encoder import TextPair
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, Task
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import embedding_request, request
from tests.engine.test_encoder import MODULE, change, loaded, save_model, write

LONGEST = 40
QUERY = "w5 w6 w7"
DOCUMENTS = [" ".join(f"w{20 + (7 * i + n) % 70}" for i in range(n)) for n in (1, 2, 9, 30, 60, 0)]
KINDS = ["bert", "roberta", "xlm-roberta"]
IDENTITY = "torch.nn.modules.linear.Identity"


def save_cross_encoder(directory: Path, kind: str = "bert", **fields: Any) -> Any:
    """Save a random cross-encoder whose scores differ, and return the model of transformers."""
    pad = {} if kind == "bert" else {"pad_token_id": 1}
    model = save_model(directory, kind, labels=1, **pad, **fields)
    write(directory / "tokenizer_config.json", {"model_max_length": LONGEST})
    return model


def pairs(directory: Path, documents: list[str] = DOCUMENTS) -> list[TextPair]:
    encoder = Tokenizer(directory).pairs(QUERY, LONGEST)
    return [encoder.encode(document) for document in documents]


def scoring_request(name: str, pair: TextPair) -> GenerationRequest:
    return replace(
        embedding_request(name, pair.token_ids),
        task=Task.SCORE,
        second_segment=pair.second_segment,
    )


def scores(engine: LoadedEngine, wanted: list[TextPair]) -> list[bytes]:
    """Score pairs through the worker, and return the results in order."""
    for index, pair in enumerate(wanted):
        each = scoring_request(str(index), pair)
        engine.worker.admission.check(each)
        engine.worker.submit(each)
    found: dict[str, bytes] = {
        request_id: delta.pooled or b""
        for step in run_until_idle(engine.worker, engine.executor)
        for request_id, delta in step.deltas
    }
    return [found[str(index)] for index in range(len(wanted))]


def numbers(found: list[bytes]) -> np.ndarray:
    return np.array([np.frombuffer(each, "<f4") for each in found])[:, 0]


def logits_of(model: Any, directory: Path, kind: str, documents: list[str]) -> np.ndarray:
    """Return the logits that transformers computes of pairs, which its tokenizer encodes."""
    tokenizer = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST, strategy="only_second")
    found = []
    for document in documents:
        pair = tokenizer.encode(QUERY, document)
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if kind == "bert" else {}
        with torch.no_grad():
            found.append(model(torch.tensor([pair.ids]), **types).logits.item())
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Scores are within 1e-5 of the sigmoid of the logits, whose documents are truncated."""
    model = save_cross_encoder(tmp_path, kind, type_vocab_size=2 if kind == "bert" else 1)
    engine = loaded(tmp_path)
    card = engine.served.card
    assert (card.capabilities.tasks, card.max_model_len) == ((Task.SCORE,), LONGEST)
    logits = logits_of(model, tmp_path, kind, DOCUMENTS)
    assert np.ptp(logits) > 0.1, "the random model must tell documents apart"
    found = numbers(scores(engine, pairs(tmp_path)))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_second_segment_changes_the_score_of_a_bert(tmp_path: Path) -> None:
    """The token types of a pair matter to a BERT, unlike to a RoBERTa."""
    for kind, matters in (("bert", True), ("roberta", False)):
        directory = tmp_path / kind
        directory.mkdir()
        save_cross_encoder(directory, kind, type_vocab_size=2)
        engine, marked = loaded(directory), pairs(directory)
        assert {pair.second_segment for pair in marked} == {5}
        plain = [pair._replace(second_segment=0) for pair in marked]
        assert (scores(engine, marked) != scores(engine, plain)) == matters


def test_bits_of_a_score_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """A pair has the same bits alone, in one step with others, and in steps of any size."""
    save_cross_encoder(tmp_path)
    wanted = pairs(tmp_path)
    alone = [scores(loaded(tmp_path), [pair])[0] for pair in wanted]
    for most in (1, 50, 512):
        engine = loaded(tmp_path, max_step_tokens=most)
        assert scores(engine, wanted) == alone
        assert scores(engine, wanted[::-1]) == alone[::-1]
    assert engine.served.card.capabilities.exact


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY}),
        ("config.json", {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}),
        ("config.json", {"sbert_ce_default_activation_function": IDENTITY}),
    ],
)
def test_activation_of_the_checkpoint(file: str, value: dict[str, Any], tmp_path: Path) -> None:
    """The activation that any version of sentence-transformers has stored replaces the sigmoid."""
    model = save_cross_encoder(tmp_path)
    path = tmp_path / file
    write(path, {**(json.loads(path.read_text()) if path.exists() else {}), **value})
    logits = logits_of(model, tmp_path, "bert", DOCUMENTS)
    found = numbers(scores(loaded(tmp_path), pairs(tmp_path)))
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inputs", [["token_type_ids"], []], ids=["types", "no types"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_scores_equal_sentence_transformers(kind: str, inputs: list[str], tmp_path: Path) -> None:
    """A checkpoint that sentence-transformers has saved gives the scores of `CrossEncoder`."""
    library = pytest.importorskip("sentence_transformers")
    from transformers import PreTrainedTokenizerFast

    save_cross_encoder(tmp_path, kind, type_vocab_size=2)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.no_truncation()
    PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="w1",
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask", *(inputs if kind == "bert" else [])],
    ).save_pretrained(tmp_path)
    model = library.CrossEncoder(str(tmp_path), device="cpu")
    saved = tmp_path / "saved"
    model.save_pretrained(str(saved))
    expected = model.predict([(QUERY, document) for document in DOCUMENTS])
    found = numbers(scores(loaded(saved), pairs(saved)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        (
            "config.json",
            {"architectures": ["DebertaV2ForSequenceClassification"]},
            "supported: BertForSequenceClassification, Roberta",
        ),
        ("config.json", {"sentence_transformers": {"activation_fn": "my.Own"}}, "'my.Own'"),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Softmax"}, "not one of"),
        ("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "a"},
         "default prompt"),
        ("modules.json", [{"path": "", "type": MODULE + name} for name in ("Transformer", "Dense")],
         "modules after a classification head"),
    ],
)  # fmt: skip
def test_unsupported_cross_encoder_is_named(
    file: str, value: object, message: str, tmp_path: Path
) -> None:
    """An error names the file, and what the engine supports."""
    save_cross_encoder(tmp_path)
    change(tmp_path, file, value)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_head_must_have_one_label(kind: str, tmp_path: Path) -> None:
    """A classifier with several labels is no cross-encoder, and a missing tensor is named."""
    save_model(tmp_path, kind, labels=3, pad_token_id=1)
    with pytest.raises(CheckpointError, match="must have one label, not 3"):
        loaded(tmp_path)
    save_cross_encoder(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["classifier.bias" if kind == "bert" else "classifier.out_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier.*bias is missing"):
        loaded(tmp_path)


@pytest.mark.parametrize("most", [None, 1, 5, 1000])
def test_only_the_document_is_truncated(most: int | None, tmp_path: Path) -> None:
    """A pair keeps the query and the special tokens, and the beginning of its document."""
    save_cross_encoder(tmp_path)
    encoder = Tokenizer(tmp_path).pairs(QUERY, 12)
    assert (encoder.first_tokens, encoder.room_tokens) == (3, 6)
    tokens = [20, 21, 22, 23, 24, 25, 26, 27]
    pair = encoder.encode(" ".join(f"w{token}" for token in tokens), most)
    assert pair == TextPair([2, 5, 6, 7, 3, *tokens[: min(most or 6, 6)], 3], 5)
    assert encoder.encode("") == TextPair([2, 5, 6, 7, 3, 3], 5)
    assert Tokenizer(tmp_path).pairs("w5 " * 20, 12).room_tokens < 0


def test_pairs_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    """Pairs have the tokens and types of the library, with any of its processors of pairs."""
    save_cross_encoder(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    for processor in (
        processors.BertProcessing(("w3", 3), ("w2", 2)),
        processors.RobertaProcessing(("w3", 3), ("w2", 2)),
        processors.TemplateProcessing(single="$A w3", pair="w2 $A w3 w3 $B w3",
                                      special_tokens=[("w2", 2), ("w3", 3)]),
    ):  # fmt: skip
        library = FastTokenizer.from_file(path)
        library.post_processor = processor
        library.no_padding()
        library.no_truncation()
        library.save(path)
        library.enable_truncation(LONGEST, strategy="only_second")
        for document, pair in zip(DOCUMENTS, pairs(tmp_path), strict=True):
            expected = library.encode(QUERY, document)
            types = expected.type_ids
            assert pair == TextPair(expected.ids, types.index(1) if 1 in types else 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("own_process", [False, True])
async def test_backend_serves_a_cross_encoder(own_process: bool, tmp_path: Path) -> None:
    """The backend scores pairs in this process and in its own one, and rejects other tasks."""
    save_cross_encoder(tmp_path)
    wanted = pairs(tmp_path)
    expected = scores(loaded(tmp_path), wanted)
    backend = EngineBackend(WorkerConfig(model=str(tmp_path), threads=1, own_process=own_process))
    await backend.start()
    try:
        for index, pair in enumerate(wanted):
            each = scoring_request(str(index), pair)
            backend.check(each)
            (delta,) = [delta async for delta in generate(backend, each)]
            assert isinstance(delta, Delta)
            assert delta.pooled == expected[index]
        for other in (embedding_request("e", [1, 2]), request("c", [1], Off(), max_tokens=3)):
            with pytest.raises(RequestRejected, match=r"use /v1/rerank or load") as error:
                backend.check(other)
            assert error.value.param == "model"
    finally:
        await backend.stop()
