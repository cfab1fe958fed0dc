"""Tests of the bounds of a request, which limit its work instead of counting its parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import LEAST_TOKENS
from draftgate.gateway.http.requests.validation import parse_chat, parse_completion
from draftgate.gateway.served_model import ServedModel

TOKENIZER = Tokenizer(SHIPPED_MODEL)
SERVED = ServedModel("m", TOKENIZER, 1 << 16)
SENDER = Sender("id")


def completion(served: ServedModel = SERVED, **fields: Any) -> Job:
    """Return the job of a completion with these fields."""
    body = json.dumps({"prompt": "a", **fields}).encode()
    return parse_completion(body, served, SENDER).job


def chat(served: ServedModel = SERVED, **fields: Any) -> Job:
    """Return the job of a chat with these fields."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    return parse_chat(body, served, SENDER).job


@pytest.mark.parametrize(
    ("sent", "used"),
    [
        (-9007199254740991, (1 << 64) - 9007199254740991),
        (-(1 << 63), 1 << 63),
        (-2, (1 << 64) - 2),
        ((1 << 64) - 1, (1 << 64) - 1),
        (0, 0),
    ],
)
def test_negative_seed_has_the_same_bits_as_its_unsigned_number(sent: int, used: int) -> None:
    """Each seed of 64 bits, with or without a sign, is a seed of the noise."""
    assert completion(seed=sent).sampling.seed == used
    assert chat(seed=sent).sampling.seed == used


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"n": 128, "max_tokens": 1000},
        {"prompt": ["a"] * 2000, "max_tokens": 8},
        {"best_of": 0},
        {"best_of": 0, "n": 2},
        {"stop": [f"stop {index}" for index in range(200)]},
        {"stop_token_ids": list(range(300))},
        {"logit_bias": {str(index): -1 for index in range(1000)}},
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"temperature": 2, "top_k": -1},
        {"top_k": 0, "logprobs": 20},
    ],
)
def test_values_that_specifications_allow_are_accepted(fields: dict[str, Any]) -> None:
    """Values at the bounds of OpenAI, vLLM and llama.cpp are accepted."""
    assert completion(**fields).prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": [[1]] * 100_000}, "prompt"),
        ({"n": 10**15}, "n"),
        ({"best_of": 10**15}, "best_of"),
    ],
)
def test_too_many_choices_are_refused_before_a_prompt_is_tokenised(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused batch costs neither the time to tokenise its prompts nor memory for its choices."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(InvalidRequest, match="--max-request-tokens") as raised:
        completion(ServedModel("m", tokenizer, 8192), **fields)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4, "max_tokens": 4096},
        {"n": 4, "max_tokens": 200, "logprobs": 20},
        {"prompt": ["a b c d e f g " * 50] * 4, "echo": True, "logprobs": 20, "max_tokens": 1},
        {"n": 2, "best_of": 16, "max_tokens": 1024},
    ],
)
def test_work_counts_prompts_outputs_and_log_probabilities(fields: dict[str, Any]) -> None:
    """A request is refused if all that it may compute is more than the setting allows."""
    small = ServedModel("m", TOKENIZER, 8192, max_request_tokens=16 * 1024)
    with pytest.raises(InvalidRequest, match="--max-request-tokens"):
        completion(small, **fields)
    assert completion(SERVED, **fields).prompts
    less = {"n": 1, "best_of": 1, "prompt": "a", "logprobs": 1}
    assert completion(small, **{**fields, **less}).n == 1


def test_outputs_without_a_limit_share_the_work_of_a_request() -> None:
    """Choices that may fill the context end where their share of the work ends."""
    served = ServedModel("m", TOKENIZER, 8192, max_request_tokens=64 * LEAST_TOKENS)
    assert chat(served).usual_max_tokens is None
    job = chat(served, n=8)
    assert job.max_tokens is None
    assert job.usual_max_tokens is not None
    assert 0 < len(job.prompts[0]) + 8 * job.usual_max_tokens <= 64 * LEAST_TOKENS
    assert job.usual_max_tokens > 8000


def test_text_may_become_any_of_many_stop_texts() -> None:
    """Text is held back while it may become a stop text, however many there are."""
    stops = [f"stop {index}." for index in range(500)]
    pieces = ["so", " st", "op 49", "9", "x stop 4", "9", ".", "y"]
    stream = TextStream(lambda ids: "".join(pieces[token] for token in ids), tuple(stops))
    texts = [stream.add(token) for token in range(len(pieces))]
    assert "".join(texts) == "so stop 499x "
    assert texts[2] == ""
    assert (stream.stopped, stream.stop_text) == (True, "stop 49.")
