"""Tests of prompts that are too long to tokenise, and of clients that leave during the work."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from draftgate.gateway.offload import MOST_THREADS, THREADS, offload
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    post_raw,
    running,
    until,
)

BYTES = 7_500_000
"""Length of a text that about fills a body of the default maximum size in JSON."""

LONG = "def f(x):\n    return x + 1\n" * (BYTES // 26)

CHAT = [{"role": "user", "content": LONG}]


class Encoded:
    """Records the texts that the tokenizer gets, and optionally holds its threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[int] = []  # characters of each text
        self.begun = 0
        self.may_run = threading.Event()
        self.may_run.set()
        encode = Tokenizer.encode

        def recorded(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
            self.begun += 1
            self.may_run.wait()
            self.texts.append(len(text))
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", recorded)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Encoded:
    """A record of what is tokenised."""
    return Encoded(monkeypatch)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["x", LONG]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": LONG, "truncation": "auto"}, "input"),
        ("/v1/responses/input_tokens", {"input": LONG}, "input"),
    ],
    ids=["text", "list", "chat", "response", "truncated", "count"],
)
async def test_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    sim: Listening,
    http: httpx.AsyncClient,
    encoded: Encoded,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    """The server rejects a prompt by its bytes, states the least number of tokens, and tokenises
    no long text."""
    encoded.texts.clear()
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    assert "this model's maximum context length is" in error["message"]
    tokenizer = sim.node.served.tokenizer
    least = tokenizer.least_tokens(LONG)
    assert least > sim.node.served.max_model_len
    stated = int(error["message"].rpartition("at least ")[2])
    assert least <= stated <= 1.01 * least
    assert sum(encoded.texts) < 100


@pytest.mark.parametrize("kept", [None, 50], ids=["whole", "truncated"])
async def test_no_tokenised_text_exceeds_the_longest_tokens_of_the_context(
    sim: Listening, http: httpx.AsyncClient, encoded: Encoded, kept: int | None
) -> None:
    """The longest text that the server tokenises has the bytes of the longest token for each token
    of the context, or for each token that truncation keeps."""
    served = sim.node.served
    token_bytes = len(served.tokenizer.beginning("x" * 1000, 1))
    longest = (kept or served.max_model_len) * token_bytes
    encoded.texts.clear()
    for size in (longest, longest + 1, 2 * longest):
        body = {"prompt": "x" * size, "max_tokens": 1, "truncate_prompt_tokens": kept}
        await http.post("/v1/completions", json=body)
    assert max(encoded.texts) == longest
    assert len(encoded.texts) == (1 if kept is None else 3)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_message_that_cannot_fit_is_refused_before_it_is_tokenised(
    http: httpx.AsyncClient, encoded: Encoded, path: str
) -> None:
    """The endpoints of Anthropic's form reject a prompt by its bytes, too."""
    encoded.texts.clear()
    body = {"model": "draftgate-demo", "max_tokens": 1, "messages": CHAT}
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert "but the text has at least" in response.json()["error"]["message"]
    assert sum(encoded.texts) < 100


async def test_tokenize_counts_prompts_of_any_length(http: httpx.AsyncClient) -> None:
    """The endpoint `/tokenize` tokenises a text that exceeds the context."""
    response = await http.post("/tokenize", json={"prompt": LONG[:1_000_000]})
    assert response.status_code == 200
    assert response.json()["count"] > response.json()["max_model_len"]


async def test_truncation_tokenises_only_the_end(qwen: ScriptedBackend, encoded: Encoded) -> None:
    """With `truncation: auto`, the server tokenises about what fits, not the whole conversation."""
    turns = [{"role": "user", "content": f"turn {n} " + "word " * 50} for n in range(5000)]
    async with running(backends=[qwen]) as gateway, client(gateway) as http:
        encoded.texts.clear()
        body = {"input": turns, "truncation": "auto", "max_output_tokens": 5}
        response = asyncio.create_task(http.post("/v1/responses", json=body))
        request = await accepted_request(qwen, response)
        qwen.emit(request, "x", last=True)
        assert (await response).status_code == 200
    assert 500 < len(request.prompt_ids) <= 995
    assert "turn 4999 " in qwen.tokenizer.decode(request.prompt_ids)
    assert sum(encoded.texts) < len(json.dumps(body)) / 10


async def test_truncated_prompts_are_tokenised_only_at_their_end(
    scripted: ScriptedBackend, encoded: Encoded
) -> None:
    """With `truncate_prompt_tokens`, the server tokenises no more than what these tokens need."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        encoded.texts.clear()
        body = {"prompt": LONG, "truncate_prompt_tokens": 50, "max_tokens": 5}
        response = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await accepted_request(scripted, response)
        scripted.emit(request, "x", last=True)
        assert (await response).status_code == 200
    assert len(request.prompt_ids) == 50
    assert sum(encoded.texts) < BYTES / 10


async def test_only_the_beginning_of_a_prediction_is_tokenised(
    scripted: ScriptedBackend, encoded: Encoded
) -> None:
    """The server tokenises no more of a prediction than an output can have."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        encoded.texts.clear()
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 5,
            "prediction": {"type": "content", "content": LONG},
        }
        response = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        request = await accepted_request(scripted, response)
        scripted.emit(request, "x", last=True)
        assert (await response).status_code == 200
    assert len(request.prediction_ids) == gateway.node.served.max_model_len
    assert sum(encoded.texts) < BYTES / 10


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([LONG[:1000]] * 100, id="many texts"),
        pytest.param(LONG[:1_000_000], id="one text of 1 MB"),
        pytest.param(LONG, id="one text of 8 MB", marks=pytest.mark.long),
    ],
)
async def test_work_for_clients_that_have_left_stops(
    scripted: ScriptedBackend, encoded: Encoded, prompt: str | list[str]
) -> None:
    """The server tokenises no further text of clients that have left, whether their requests run
    or wait for a thread."""
    scripted.card = replace(scripted.card, max_model_len=2 * BYTES)
    clients, body = 3 * MOST_THREADS, {"prompt": prompt, "max_tokens": 1}
    async with running(backends=[scripted]) as gateway:
        node = gateway.node
        encoded.begun = 0
        encoded.may_run.clear()
        try:
            sent = [await post_raw(gateway, "/v1/completions", body) for _ in range(clients)]
            await until(lambda: node.in_flight == clients)
            await until(lambda: encoded.begun == THREADS)
            for _, writer in sent:
                writer.close()
            await until(lambda: node.in_flight == 0)
        finally:
            encoded.may_run.set()
        await asyncio.gather(*(offload(lambda: None) for _ in range(clients)))
        assert encoded.begun == THREADS
    assert scripted.submitted.empty()
