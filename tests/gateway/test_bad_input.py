"""Tests of malformed requests, which get a 4xx that names the parameter and never a 500."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import httpx
import pytest

from tests.gateway.harness import client, post_raw, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": ["a", [1, "b"]]}, "prompt[1][1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 20, "n": 1000}, "n"),
    ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**400}, "max_tokens"),
    ({"prompt": "a", "seed": 10**400}, "seed"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": True}, "temperature"),
    ({"prompt": "a", "top_p": -0.01}, "top_p"),
    ({"prompt": "a", "top_p": 1.01}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "seed": -(1 << 63) - 1}, "seed"),
    ({"prompt": "a", "seed": 1 << 64}, "seed"),
    ({"prompt": "a", "seed": 0.5}, "seed"),
    ({"prompt": "a", "stop": [str(i) for i in range(1025)]}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "stop": "x" * 16385}, "stop"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 2049}, "n"),
    ({"prompt": "a", "n": 10**15}, "n"),
    ({"prompt": "a", "n": 128, "max_tokens": 16384}, "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": []}, "stream_options"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "a", "speculation": {"mode": "psychic"}}, "speculation.mode"),
    ({"prompt": "a", "speculation": {"mode": "sparse_self"}}, "speculation.mode"),
    ({"prompt": "a", "speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
    ({"prompt": "a", "speculation": "off"}, "speculation"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "suffix": "end"}, "suffix"),
    ({"prompt": "a", "best_of": 2049}, "best_of"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "a", "best_of": True}, "best_of"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    ({"prompt": "a", "length_penalty": True}, "length_penalty"),
    ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"prompt": "a", "tool_choice": "required"}, "tool_choice"),
    ({"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty"),
    ({"prompt": "a", "frequency_penalty": "much"}, "frequency_penalty"),
    ({"prompt": "a", "presence_penalty": -2.1}, "presence_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": -1.2}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": 1e30}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(10**400): 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 10**30}, "min_tokens"),
    ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [5, 10**6]}, "stop_token_ids[1]"),
    ({"prompt": "a", "stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ({"prompt": "a", "bad_words": "word"}, "bad_words"),
    ({"prompt": "a", "bad_words": ["word"] * 1025}, "bad_words"),
    ({"prompt": "a", "bad_words": ["x" * 257]}, "bad_words"),
    ({"prompt": "a", "skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": "a", "include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [5, 10**6]}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
    ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ({"prompt": "a", "return_token_ids": "yes"}, "return_token_ids"),
    ({"prompt": "a", "return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
]

BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "hi", "function_call": {}}]},
     "messages[0].function_call"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"messages": HI, "min_tokens": 9000}, "min_tokens"),
    ({"messages": HI, "logit_bias": {"5": -101}}, "logit_bias"),
    ({"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    ({"messages": HI, "logprobs": 2}, "logprobs"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
     "continue_final_message"),
    ({"messages": [*HI, {"role": "assistant", "content": "a", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
      "continue_final_message": True}, "messages[1].tool_calls"),
    ({"messages": HI, "allowed_token_ids": [5], "tool_choice": "required",
      "tools": [{"type": "function", "function": {"name": "f"}}]}, "allowed_token_ids"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}],
      "guided_grammar": 'start: "a"'}, "guided_grammar"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HI, "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": HI, "web_search_options": {}}, "web_search_options"),
    ({"messages": HI, "enable_thinking": True}, "enable_thinking"),
    ({"messages": HI, "thinking": {"type": "enabled"}}, "thinking"),
    ({"messages": HI, "echo": True}, "echo"),
    ({"messages": HI, "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"messages": HI, "best_of": 3}, "best_of"),
    ({"messages": HI, "suffix": "end"}, "suffix"),
    ({"messages": HI, "prediction": "a"}, "prediction"),
    ({"messages": HI, "prediction": {"type": "content"}}, "prediction"),
    ({"messages": HI, "prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    ({"messages": HI, "prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"messages": HI, "prediction": {"type": "content", "content": [{"type": "image_url"}]}},
     "prediction.content[0].type"),
    ({"messages": HI,
      "prediction": {"type": "content", "content": [{"type": "refusal", "refusal": "a"}]}},
     "prediction.content[0].type"),
    ({"messages": HI, "prediction": {"type": "content", "content": [{"type": "text"}]}},
     "prediction.content[0]"),
]  # fmt: skip

CASES = [(TEXT, *case) for case in BAD_TEXT] + [(CHAT, *case) for case in BAD_CHAT]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_malformed_field_is_400_and_named(http: httpx.AsyncClient, stream: bool) -> None:
    """The server responds with OpenAI's error format and the path of the malformed field as
    `param`."""
    wrong = []
    for path, body, param in CASES:
        sent = {"stream": True, **body} if stream and "stream_options" not in body else body
        response = await http.post(path, json=sent)
        error = response.json().get("error", {})
        if response.status_code != 400 or error.get("param") != param or not error.get("message"):
            wrong.append((body, response.status_code, error))
    assert wrong == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} trailing',
    ],
)
async def test_malformed_json_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    """The server responds with 400 to a body that is not a JSON object."""
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        response = await http.post(path, content=body)
        if path == "/tokenize" and b'"a", ' in body:
            continue  # /tokenize ignores fields that it does not know
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_neutral_and_unknown_fields_are_accepted(http: httpx.AsyncClient) -> None:
    """The server accepts unknown fields and neutral values of unsupported fields."""
    body = {
        "prompt": "a", "max_tokens": 2, "user": "u", "service_tier": "auto", "store": False,
        "metadata": {"a": 1}, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
        "best_of": 2, "n": 2, "echo": False, "suffix": None, "logprobs": None, "stop": None,
        "repetition_penalty": 1.0, "min_tokens": 0, "top_k": 10**400, "seed": (1 << 64) - 1,
        "stop_token_ids": [], "bad_words": ["", "word"], "truncate_prompt_tokens": 5,
    }  # fmt: skip
    assert (await http.post(TEXT, json=body)).status_code == 200
    chat = {
        "messages": HI, "max_tokens": 2, "tools": [], "tool_choice": "none",
        "add_generation_prompt": True, "skip_special_tokens": True,
        "response_format": {"type": "text"}, "parallel_tool_calls": True,
    }  # fmt: skip
    assert (await http.post(CHAT, json=chat)).status_code == 200


async def test_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    """The server responds with OpenAI's `model_not_found` error to an unknown model."""
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        response = await http.post(path, json={"model": "gpt-9", **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert "gpt-9" in error["message"]
    assert (await http.get("/v1/models/gpt-9")).status_code == 404


async def test_error_message_is_bounded(http: httpx.AsyncClient) -> None:
    """The server truncates a long invalid value in its error message."""
    response = await http.post(TEXT, json={"model": "x" * 1_000_000, "prompt": "a"})
    assert response.status_code == 404
    assert len(response.content) < 2000


async def test_too_long_request_is_400_with_both_lengths(http: httpx.AsyncClient) -> None:
    """The server rejects a request beyond the context with the maximum and the requested length."""
    response = await http.post(TEXT, json={"prompt": [5] * 10, "max_tokens": 8190})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "8192" in error["message"]
    assert "8190" in error["message"]
    response = await http.post(TEXT, json={"prompt": [5] * 9000})
    assert response.json()["error"]["param"] == "prompt"
    long = [{"role": "user", "content": "a b " * 9000}]
    response = await http.post(CHAT, json={"messages": long})
    assert response.json()["error"]["param"] == "messages"


async def test_too_large_body_is_413() -> None:
    """The server responds with 413 to a body above the configured limit."""
    async with running(max_body_bytes=1000) as gateway, client(gateway) as http:
        response = await http.post(TEXT, json={"prompt": "x" * 2000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert (await http.post(TEXT, json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_broken_content_encoding_is_400(http: httpx.AsyncClient) -> None:
    """The server rejects a badly compressed body with 400 and accepts a valid compressed body."""
    for headers in ({"content-encoding": "gzip"}, {"content-encoding": "deflate"}):
        response = await http.post(TEXT, content=b"no such thing", headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    packed = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    response = await http.post(TEXT, content=packed, headers={"content-encoding": "gzip"})
    assert response.status_code == 200


@pytest.mark.parametrize("path", [TEXT, "/v1/nothing"])
async def test_broken_content_encoding_is_not_logged(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server logs no error for a badly compressed body and closes the connection."""
    async with running() as gateway:
        reader, writer = await post_raw(gateway, path, {}, "Content-Encoding: gzip\r\n")
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 40")
        writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_decompressed_size_is_limited() -> None:
    """The server applies the size limit to the decompressed body."""
    async with running(max_body_bytes=100_000) as gateway, client(gateway) as http:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        response = await http.post(TEXT, content=bomb, headers={"content-encoding": "gzip"})
        assert response.status_code == 413


async def test_unknown_paths_and_methods_return_openais_error(http: httpx.AsyncClient) -> None:
    """The server responds to unknown paths and methods with OpenAI's error format."""
    response = await http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await http.get(TEXT)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("value", [b"tea", b"\xff"])
async def test_unsupported_expect_header_is_417(http: httpx.AsyncClient, value: bytes) -> None:
    """The response to an unsupported Expect header has status 417, a request id and OpenAI's error
    format."""
    response = await http.get("/health", headers={"expect": value})
    assert response.status_code == 417
    assert response.json()["error"]["code"] == "expectation_failed"
    assert response.headers["x-request-id"]


async def test_unexpected_exception_is_a_bare_500(
    sim: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server responds with 500 and does not send the exception's text to the client."""

    def explode(_job: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(sim.node.dispatcher.admission, "admit_now", explode)
    response = await http.post(TEXT, json={"prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert json.loads(response.text)["error"]["code"] == "internal_error"
