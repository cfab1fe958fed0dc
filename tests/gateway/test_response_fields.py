"""Tests of the fields of the response object, which the Open Responses specification types."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import InputTokenCountResponse

from draftgate.backends.types import Delta, FinishReason, GenerationRequest, TokenLogprob
from draftgate.gateway.app import Listening
from draftgate.gateway.http.requests.responses import drop_oldest_turns
from draftgate.gateway.http.requests.schemas import Message
from tests.conformance.open_responses import check_response
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    events,
    needs_engine,
    running,
)

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


async def respond(
    backend: ScriptedBackend, http: httpx.AsyncClient, deltas: list[Delta], **body: Any
) -> tuple[GenerationRequest, httpx.Response]:
    """Send a request, and return what the worker got and the response to these deltas."""
    response = asyncio.create_task(http.post(PATH, json={"input": "hi", **body}))
    request = await accepted_request(backend, response)
    for delta in deltas:
        backend.sinks.deliver([(request.request_id, delta)])
        await asyncio.sleep(0)
    return request, await response


def last(text: str = "ok", reason: FinishReason = FinishReason.STOP) -> list[Delta]:
    """Return the only delta of a response."""
    return [Delta(0, (1,), text, (), reason)]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_response_object_has_every_required_field(
    qwen: ScriptedBackend, http: httpx.AsyncClient, stream: bool, reason: FinishReason
) -> None:
    """Whole responses and all snapshots of a stream have every field of the specification."""
    before = int(time.time())
    _, response = await respond(qwen, http, last("Yes.", reason), stream=stream)
    if not stream:
        bodies = [response.json()]
    else:
        bodies = [one["response"] for one in events(response.text) if "response" in one]
        assert [body["status"] for body in bodies[:-1]] == ["in_progress", "in_progress"]
    for body in bodies:
        check_response(body)
    completed = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}[reason]
    assert bodies[-1]["status"] == completed
    if reason is FinishReason.STOP:
        assert before <= bodies[-1]["created_at"] <= bodies[-1]["completed_at"] <= time.time()


async def test_failed_response_object_has_every_required_field(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The snapshot of a failed response has every field and no time of completion."""
    begun = asyncio.Event()

    async def read() -> str:
        lines = []
        async with http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                begun.set()
        return "\n".join(lines)

    reading = asyncio.create_task(read())
    request = await qwen.submitted.get()
    qwen.emit(request, "half")
    await begun.wait()
    qwen.crash("device lost")
    body = events(await reading)[-2]["response"]
    assert body["status"] == "failed"
    check_response(body)


async def test_response_repeats_the_settings_of_the_request(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The response repeats the settings, and the worker gets those that concern it."""
    settings: dict[str, Any] = {
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_logprobs": 2,
        "truncation": "auto", "max_tool_calls": 3, "safety_identifier": "s",
        "prompt_cache_key": "k", "reasoning": {"effort": "high", "summary": "auto"},
    }  # fmt: skip
    request, response = await respond(
        qwen, http, last(), **settings, text={"verbosity": "low"}, service_tier="flex",
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    body = response.json()
    check_response(body)
    assert {name: body[name] for name in settings} == settings
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert body["service_tier"] == "default"  # the tier that served the request
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logprobs == 2


async def test_response_reports_defaults(qwen: ScriptedBackend, http: httpx.AsyncClient) -> None:
    """The response reports the default of every setting that the request does not have."""
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    _, response = await respond(
        qwen, http, last("{}"), text={"format": schema}, reasoning={"generate_summary": "concise"}
    )
    body = response.json()
    assert body["text"] == {
        "format": {**schema, "description": None, "strict": False}, "verbosity": "medium",
    }  # fmt: skip
    assert body["reasoning"] == {"effort": None, "summary": "concise"}
    assert (body["truncation"], body["top_logprobs"]) == ("disabled", 0)


def spoken(backend: ScriptedBackend) -> list[Delta]:
    """Return deltas with the log probabilities of their tokens, two of them without text."""
    ids = backend.tokenizer.encode("Good day to you", add_special_tokens=False)
    tokens = [TokenLogprob(i, -0.5 - n, ((i, -0.5 - n), (7, -3.0))) for n, i in enumerate(ids)]
    texts = [backend.tokenizer.token_text(i) for i in ids]
    return [
        Delta(0, tuple(ids[:2]), "".join(texts[:2]), tuple(tokens[:2])),
        Delta(0, tuple(ids[2:3]), "", tuple(tokens[2:3])),
        Delta(0, tuple(ids[3:]), "".join(texts[2:]), tuple(tokens[3:])),
        Delta(0, (0,), "", (TokenLogprob(0, -0.1),), FinishReason.STOP),
    ]


@pytest.mark.parametrize(
    "asked", [{"include": [LOGPROBS]}, {"top_logprobs": 2}], ids=["include", "top_logprobs"]
)
async def test_response_includes_log_probabilities(
    qwen: ScriptedBackend, http: httpx.AsyncClient, asked: dict[str, Any]
) -> None:
    """The text has the log probability of each token, and the deltas of a stream add up to it."""
    deltas = spoken(qwen)
    expected = [entry.logprob for delta in deltas for entry in delta.logprobs]
    request, response = await respond(qwen, http, deltas, **asked)
    assert request.sampling.logprobs == asked.get("top_logprobs", 0)
    part = response.json()["output"][0]["content"][0]
    assert [entry["logprob"] for entry in part["logprobs"]] == expected
    assert part["text"].startswith("".join(entry["token"] for entry in part["logprobs"][:2]))
    first = part["logprobs"][0]
    assert first["top_logprobs"][0]["token"] == first["token"]
    check_response(response.json())
    _, streamed = await respond(qwen, http, deltas, stream=True, **asked)
    found = events(streamed.text)[:-1]
    sent = [one for one in found if one["type"] == "response.output_text.delta"]
    assert [entry for one in sent for entry in one["logprobs"]] == part["logprobs"]
    (done,) = [one for one in found if one["type"] == "response.output_text.done"]
    assert (done["text"], done["logprobs"]) == (part["text"], part["logprobs"])
    assert found[-1]["response"]["output"][0]["content"] == [part]


async def test_tokens_without_text_have_their_bytes(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A token with part of a character has its raw bytes."""
    tokenizer = qwen.tokenizer
    partial = next(i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i))
    delta = Delta(0, (partial,), "", (TokenLogprob(partial, -1.0),), FinishReason.STOP)
    _, response = await respond(qwen, http, [delta], include=[LOGPROBS])
    check_response(response.json())
    (entry,) = response.json()["output"][0]["content"][0]["logprobs"]
    assert entry["bytes"] == list(tokenizer.bytes[partial]) != []


async def test_reasoning_items_are_not_part_of_the_prompt(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server accepts reasoning items, and the prompt is the same without them."""
    reasoning = {
        "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}],
        "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": "gAAA",
    }  # fmt: skip
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"c{i}", "name": "now", "arguments": "{}"}
        for i in range(2)
    ]
    plain = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "Wait."},
        *calls,
    ]
    mixed = [plain[0], reasoning, plain[1], reasoning, plain[2], reasoning, plain[3]]
    without, _ = await respond(qwen, http, last(), input=plain)
    request, _ = await respond(qwen, http, last(), input=mixed)
    assert list(request.prompt_ids) == list(without.prompt_ids)


async def test_truncation_drops_the_oldest_turns(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """With `truncation: auto`, the prompt has the instructions and the last turns that fit."""
    turns = [
        {"role": role, "content": f"{role} {turn} " + "word " * 30}
        for turn in range(20)
        for role in ("user", "assistant")
    ]
    body = {"input": [*turns, {"role": "user", "content": "Last?"}], "instructions": "Be brief."}
    refused = await http.post(PATH, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    request, response = await respond(
        qwen, http, last(), **body, truncation="auto", max_output_tokens=50
    )
    prompt = qwen.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    kept = [turn for turn in range(20) if f"user {turn} " in prompt]
    assert kept == list(range(kept[0], 20))
    assert kept[0] > 0
    assert "Be brief." in prompt
    assert "Last?" in prompt
    assert response.json()["usage"]["input_tokens"] == len(request.prompt_ids) <= 950
    one_turn = {"input": "word " * 2000, "truncation": "auto"}
    assert (await http.post(PATH, json=one_turn)).status_code == 400


@given(
    roles=st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"])),
    capacity=st.integers(0, 12),
)
def test_truncation_keeps_as_many_turns_as_fit(roles: list[str], capacity: int) -> None:
    """System messages and the last turn stay, and one more turn would not fit."""
    messages = [Message(role, str(index)) for index, role in enumerate(roles)]
    kept = drop_oldest_turns(messages, lambda some: len(some) <= capacity)
    optional = [m for m in messages if m.role not in {"system", "developer"}]
    conversation = [m for m in kept if m.role not in {"system", "developer"}]
    assert len(kept) - len(conversation) == len(messages) - len(optional)
    assert conversation == optional[len(optional) - len(conversation) :]
    if len(conversation) < len(optional):
        assert conversation[0].role == "user"
        users = [i for i, m in enumerate(optional[: -len(conversation)]) if m.role == "user"]
        begin = users[-1] if len(users) > 1 else 0
        assert len(kept) + len(optional) - len(conversation) - begin > capacity
    if len(kept) > capacity:
        assert sum(m.role == "user" for m in conversation) <= 1


@needs_engine
async def test_log_probabilities_are_those_of_the_equivalent_chat() -> None:
    """The engine's log probabilities and penalties are the same in a chat and a response."""
    same = {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_logprobs": 3}
    async with (
        running(backend="engine", kv_bytes=32 << 20, threads=1) as gateway,
        client(gateway) as http,
    ):
        messages = [{"role": "user", "content": "def add(a, b):"}]
        chat = await http.post(
            "/v1/chat/completions",
            json={"messages": messages, "max_tokens": 12, "logprobs": True, **same},
        )
        response = await http.post(
            PATH, json={"input": "def add(a, b):", "max_output_tokens": 12, **same}
        )
    (choice,) = chat.json()["choices"]
    part = response.json()["output"][0]["content"][0]
    assert part["text"] == choice["message"]["content"]
    expected = [{**e, "bytes": e["bytes"] or []} for e in choice["logprobs"]["content"]]
    assert [(e["token"], e["logprob"], e["bytes"]) for e in part["logprobs"]] == [
        (e["token"], e["logprob"], e["bytes"]) for e in expected
    ]
    assert len(part["logprobs"][0]["top_logprobs"]) == 3


async def test_input_tokens_are_those_of_the_response(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The counted input tokens are the input tokens of the response to the same body."""
    function = {"type": "function", "name": "now"}
    for body in (
        {"input": "Time?"},
        {"input": [{"role": "user", "content": "Time?"}], "instructions": "Be brief.",
         "tools": [function]},
        {"input": "Time? " * 5000},
    ):  # fmt: skip
        counted = await http.post(f"{PATH}/input_tokens", json=body)
        count = InputTokenCountResponse.model_validate(counted.json(), strict=True).input_tokens
        if count < 900:
            _, response = await respond(qwen, http, last(), **body)
            assert response.json()["usage"]["input_tokens"] == count
        else:
            assert (await http.post(PATH, json=body)).status_code == 400
    refused = await http.post(f"{PATH}/input_tokens", json={"input": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
