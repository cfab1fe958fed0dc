"""Tests that agents can continue after any response of the server, in both chat APIs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest
from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, accepted_request, client, running
from tests.gateway.tool_models import TOOLS, with_template

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "Weather in Paris?"}]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

TRUNCATED = '{"city": "Pa'
TRUNCATED_TEXTS = {
    "qwen2_5": f'<tool_call>\n{{"name": "weather", "arguments": {TRUNCATED}',
    "qwen3": f'<tool_call>\n{{"name": "weather", "arguments": {TRUNCATED}',
    "mistral_v2v3": f'[TOOL_CALLS][{{"name": "weather", "arguments": {TRUNCATED}',
    "mistral_v3_tekken": f'[TOOL_CALLS][{{"name": "weather", "arguments": {TRUNCATED}',
    "llama3_1": f'{{"name": "weather", "parameters": {TRUNCATED}',
    "llama3_2": f'{{"name": "weather", "parameters": {TRUNCATED}',
}


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


async def respond(
    backend: ScriptedBackend,
    http: httpx.AsyncClient,
    path: str,
    text: str = "ok",
    reason: FinishReason = FinishReason.STOP,
    **body: Any,
) -> tuple[GenerationRequest, str, dict[str, Any]]:
    """Send a request, and return what the worker got, its prompt and the response to this text."""
    response = asyncio.create_task(http.post(path, json={"max_tokens": 100, **body}))
    request = await accepted_request(backend, response)
    delta = Delta(0, (1,), text, (), reason)
    backend.sinks.deliver([(request.request_id, delta)])
    prompt = backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    return request, prompt, (await response).json()


@pytest.mark.parametrize("template", TRUNCATED_TEXTS)
async def test_truncated_call_can_be_sent_back(
    scripted: ScriptedBackend, tmp_path: Path, template: str
) -> None:
    """The server renders the truncated arguments of its own call in every dialect."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", template))
    scripted.kv_tokens = 1000
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        text, cut = TRUNCATED_TEXTS[template], FinishReason.LENGTH
        _, _, body = await respond(scripted, http, CHAT, text, cut, messages=HI, tools=TOOLS)
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": TRUNCATED}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "invalid JSON"}
        _, prompt, _ = await respond(
            scripted, http, CHAT, messages=[*HI, message, result], tools=TOOLS
        )
    assert TRUNCATED in prompt
    assert "invalid JSON" in prompt


@pytest.mark.parametrize("arguments", ["", " ", "[", "[]", "7", "null", TRUNCATED, '{"a": NaN}'])
async def test_invalid_arguments_are_rendered_as_they_are(
    qwen: ScriptedBackend, http: httpx.AsyncClient, arguments: str
) -> None:
    """The server renders arguments that are not a JSON object unchanged, in both APIs."""
    function = {"name": "weather", "arguments": arguments}
    messages = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "failed"},
    ]
    items = [
        *HI,
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "failed"},
    ]
    _, chat, _ = await respond(qwen, http, CHAT, messages=messages, tools=TOOLS)
    _, prompt, _ = await respond(qwen, http, RESPONSES, input=items, tools=FLAT_TOOLS)
    assert f'{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' in chat
    assert prompt == chat


async def test_output_items_can_be_sent_back(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server accepts the output items of a truncated response as input."""
    text = "Let me see.\n" + TRUNCATED_TEXTS["qwen2_5"]
    _, _, body = await respond(
        qwen, http, RESPONSES, text, FinishReason.LENGTH, input=HI, tools=FLAT_TOOLS
    )
    assert body["status"] == "incomplete"
    call = body["output"][-1]
    items = [
        *HI, *body["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "invalid JSON"},
    ]  # fmt: skip
    _, prompt, again = await respond(qwen, http, RESPONSES, input=items, tools=FLAT_TOOLS)
    assert f"<|im_start|>assistant\nLet me see.\n{TRUNCATED_TEXTS['qwen2_5']}}}" in prompt
    assert again["status"] == "completed"


async def test_refusals_are_text_of_the_assistant(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server renders a refusal as the assistant's text, as a part, a field or an item."""
    part = {"type": "refusal", "refusal": "I cannot."}
    more = {"role": "user", "content": "Why?"}
    written = {"role": "assistant", "content": "I cannot."}
    _, expected, _ = await respond(qwen, http, CHAT, messages=[*HI, written, more])
    for message in (
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": "I ", "refusal": "cannot."},
        {"role": "assistant", "content": "I cannot.", "refusal": None},
    ):
        _, prompt, _ = await respond(qwen, http, CHAT, messages=[*HI, message, more])
        assert prompt == expected
    item = {"type": "message", "id": "m", "role": "assistant", "content": [part]}
    _, prompt, _ = await respond(qwen, http, RESPONSES, input=[*HI, item, more])
    assert prompt == expected


async def test_refusal_of_another_role_is_400(http: httpx.AsyncClient) -> None:
    """The server rejects refusals of users, and refusals without text, and names the field."""
    part = {"type": "refusal", "refusal": "no"}
    empty = {"type": "refusal"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "refusal": "no"}]},
         "messages[0].refusal"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": [empty]}]},
         "messages[1].content[0].refusal"),
        (RESPONSES, {"input": [{"role": "user", "content": [part]}]}, "input[0].content[0].type"),
    ]  # fmt: skip
    for path, body, param in cases:
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def allowed(path: str, names: list[str], **fields: str) -> dict[str, Any]:
    """Return the tools, and a choice that allows some of them, in the layout of an API."""
    if path == RESPONSES:
        tools = [{"type": "function", "name": name} for name in names]
        return {
            "tools": FLAT_TOOLS,
            "tool_choice": {"type": "allowed_tools", "tools": tools, **fields},
        }
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"tools": tools, **fields}}
    return {"tools": TOOLS, "tool_choice": choice}


def called(path: str, body: dict[str, Any]) -> list[str]:
    """Return the names of the functions that a response calls."""
    if path == RESPONSES:
        return [item["name"] for item in body["output"] if item["type"] == "function_call"]
    calls = body["choices"][0]["message"].get("tool_calls", [])
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_response_calls_only_allowed_tools(
    qwen: ScriptedBackend, http: httpx.AsyncClient, path: str
) -> None:
    """The prompt contains only the allowed tools, and the server recognises only their calls."""
    history = {"input": HI} if path == RESPONSES else {"messages": HI}
    text = WEATHER_CALL + NOW_CALL
    choice = allowed(path, ["now"], mode="auto")
    request, prompt, body = await respond(qwen, http, path, text, **history, **choice)
    assert ('"name": "now"' in prompt, '"name": "weather"' in prompt) == (True, False)
    assert called(path, body) == ["now"]
    assert request.grammar is None
    if path == RESPONSES:
        assert Response.model_validate(body).tool_choice.mode == "auto"
        assert body["tool_choice"] == choice["tool_choice"]
    _, _, body = await respond(
        qwen, http, path, text, **history, **allowed(path, ["weather", "now"])
    )
    assert called(path, body) == ["weather", "now"]
    _, prompt, body = await respond(
        qwen, http, path, text, **history, **allowed(path, ["now"], mode="none")
    )
    assert "<tools>" not in prompt
    assert called(path, body) == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_required_call_of_allowed_tools_excludes_other_tools(
    qwen: ScriptedBackend, http: httpx.AsyncClient, path: str
) -> None:
    """The grammar of a required call contains only the allowed tools."""
    history = {"input": HI} if path == RESPONSES else {"messages": HI}
    choice = allowed(path, ["now"], mode="required")
    request, _, body = await respond(qwen, http, path, NOW_CALL, **history, **choice)
    assert request.grammar is not None
    assert "now" in request.grammar.text
    assert "weather" not in request.grammar.text
    assert called(path, body) == ["now"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_malformed_allowed_tools_are_400_and_named(
    http: httpx.AsyncClient, path: str
) -> None:
    """The server rejects unknown allowed tools, modes and required calls of no tool."""
    history = {"input": HI} if path == RESPONSES else {"messages": HI}
    tools, name = (
        ("tools", "name") if path == RESPONSES else ("allowed_tools.tools", "function.name")
    )
    cases = [
        (allowed(path, ["now", "other"]), f"tool_choice.{tools}[1].{name}"),
        (allowed(path, ["now"], mode="often"), f"tool_choice.{tools[:-5]}mode"),
        (allowed(path, [], mode="required"), "tool_choice"),
        (allowed(path, ["now"] * 129), f"tool_choice.{tools}"),
    ]
    for body, param in cases:
        response = await http.post(path, json={**history, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert param in error["message"]


@pytest.mark.parametrize("template", ["llama3_1", "llama3_2"])
async def test_several_calls_become_messages_where_templates_take_one(
    scripted: ScriptedBackend, tmp_path: Path, template: str
) -> None:
    """The server renders each of its calls, also with templates that take one call per message."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", template))
    scripted.kv_tokens = 1000
    calls = '{"name": "now", "parameters": {}}', '{"name": "weather", "parameters": {"days": 2}}'
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        _, _, body = await respond(scripted, http, CHAT, "; ".join(calls), messages=HI, tools=TOOLS)
        message = body["choices"][0]["message"]
        assert called(CHAT, body) == ["now", "weather"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
            for call in message["tool_calls"]
        ]
        _, prompt, _ = await respond(
            scripted, http, CHAT, messages=[*HI, message, *results], tools=TOOLS
        )
    assert all(call in prompt for call in calls)
    assert prompt.index(calls[0]) < prompt.index(calls[1])
