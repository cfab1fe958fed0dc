"""Tests of function calls over HTTP with a scripted worker and with the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from tests.gateway.clients import openai_client
from tests.gateway.harness import ScriptedBackend, client, events, needs_engine, running
from tests.gateway.tool_models import NOW, TOOLS, WEATHER, with_template

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Weather in Paris?"}]
REQUEST = {"messages": HI, "max_tokens": 200, "tools": TOOLS}
STEPS = [
    "Let me see.\n<tool_",
    'call>\n{"name": "weather", "argum',
    'ents": {"city": "Pa',
    'ris", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}',
    "\n</tool_call>",
]
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def api(qwen: ScriptedBackend) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of a node with that worker."""
    async with (
        running(backends=[qwen]) as gateway,
        openai_client(gateway.url) as opened,
    ):
        yield opened


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


async def emit_steps(backend: ScriptedBackend, steps: list[str], **options: Any) -> None:
    """Respond to the next request with these steps."""
    request = await backend.submitted.get()
    for step in steps:
        backend.emit(request, step, last=step is steps[-1], **options)
        await asyncio.sleep(0)


async def test_whole_response_has_text_calls_and_finish_reason(
    qwen: ScriptedBackend, api: AsyncOpenAI
) -> None:
    """A whole response contains the text, the calls and the finish reason `tool_calls`."""
    response = asyncio.create_task(api.chat.completions.create(model="scripted", **REQUEST))
    await emit_steps(qwen, STEPS)
    (choice,) = (await response).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    weather, now = choice.message.tool_calls
    assert (weather.type, weather.function.name) == ("function", "weather")
    assert json.loads(weather.function.arguments) == {"city": "Paris", "days": 2}
    assert (now.function.name, now.function.arguments) == ("now", "{}")
    assert len({weather.id, now.id}) == 2


async def test_clients_accumulator_rebuilds_streamed_calls(
    qwen: ScriptedBackend, api: AsyncOpenAI
) -> None:
    """The accumulator of OpenAI's client rebuilds the calls of a stream."""

    async def streamed() -> Any:
        async with api.chat.completions.stream(model="scripted", **REQUEST) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    response = asyncio.create_task(streamed())
    await emit_steps(qwen, STEPS)
    (choice,) = (await response).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    called = [c.function for c in choice.message.tool_calls]
    assert [(f.name, json.loads(f.arguments)) for f in called] == [
        ("weather", {"city": "Paris", "days": 2}),
        ("now", {}),
    ]


async def test_streamed_call_begins_with_id_and_name(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The first chunk of a call contains its id and name, and later chunks contain its
    arguments."""
    response = asyncio.create_task(http.post(CHAT, json={**REQUEST, "stream": True}))
    await emit_steps(qwen, STEPS)
    chunks = events((await response).text)[:-1]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    first = {index: next(p for p in pieces if p["index"] == index) for index in (0, 1)}
    assert [first[i]["function"]["name"] for i in (0, 1)] == ["weather", "now"]
    assert all(set(p) == {"index", "function"} for p in pieces if p not in first.values())
    arguments = "".join(p["function"]["arguments"] for p in pieces if p["index"] == 0)
    assert arguments == '{"city": "Paris", "days": 2}'


async def test_text_that_is_not_a_call_is_content(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server returns unknown functions, partial tags and bare JSON as content."""
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call> {"name": "now"} <tool_ca'
    for stream in (False, True):
        response = asyncio.create_task(http.post(CHAT, json={**REQUEST, "stream": stream}))
        await emit_steps(qwen, [text[:40], text[40:]])
        if stream:
            choices = [c for e in events((await response).text)[:-1] for c in e["choices"]]
            content = "".join(c["delta"].get("content", "") for c in choices)
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = (await response).json()["choices"]
            content, reason = choice["message"]["content"], choice["finish_reason"]
            assert "tool_calls" not in choice["message"]
        assert (content, reason) == (text, "stop")


async def test_choices_have_separate_calls_and_ids(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server parses the calls of each choice separately and gives them different ids."""
    response = asyncio.create_task(http.post(CHAT, json={**REQUEST, "n": 2}))
    request = await qwen.submitted.get()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, last in ((call[:20], False), (call[20:], True)):
        for choice in (0, 1):
            qwen.emit(request, text, last=last, choice=choice)
    calls = [c["message"]["tool_calls"] for c in (await response).json()["choices"]]
    assert [c["message"]["content"] for c in (await response).json()["choices"]] == [None, None]
    assert [len(of_choice) for of_choice in calls] == [1, 1]
    assert calls[0][0]["id"] != calls[1][0]["id"]


async def test_prompt_has_tools_calls_and_results_in_qwens_format(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The prompt contains the tools, the calls and the results in Qwen's format."""
    function = {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    response = asyncio.create_task(http.post(CHAT, json={**REQUEST, "messages": messages}))
    request = await qwen.submitted.get()
    prompt = qwen.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    qwen.emit(request, "Sunny.", last=True)
    assert (await response).status_code == 200
    body = {"messages": messages, "tools": TOOLS}
    assert (await http.post("/tokenize", json=body)).json()["tokens"] == list(request.prompt_ids)
    assert json.dumps(WEATHER) in prompt
    assert json.dumps(NOW) in prompt
    called = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
    assert f"<tool_call>\n{called}\n</tool_call>" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


CALL_TEXTS = {
    "qwen2_5": CALLED,
    "qwen3": f"<think>\nHm.\n</think>\n\n{CALLED}",
    "mistral_v2v3": '[{"name": "now", "arguments": {}}]',  # without the special token
    "mistral_v3_tekken": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "llama3_1": '{"name": "now", "parameters": {}}',
    "llama3_2": '{"name": "now", "parameters": {}}',
}


@pytest.mark.parametrize("template", CALL_TEXTS)
async def test_returned_call_can_be_sent_back(
    scripted: ScriptedBackend, tmp_path: Path, template: str
) -> None:
    """The template of every dialect accepts a returned call and its result."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", template))
    scripted.kv_tokens = 1000
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        response = asyncio.create_task(http.post(CHAT, json=REQUEST))
        await emit_steps(scripted, [CALL_TEXTS[template]])
        message = (await response).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}
        again = asyncio.create_task(
            http.post(CHAT, json={**REQUEST, "messages": [*HI, message, result]})
        )
        request = await scripted.submitted.get()
        prompt = scripted.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        scripted.emit(request, "Noon.", last=True)
        assert (await again).json()["choices"][0]["message"]["content"] == "Noon."
    assert "12:00" in prompt


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_tool_choice_none_hides_the_tools(
    qwen: ScriptedBackend, http: httpx.AsyncClient, choice: str | None
) -> None:
    """The server hides the tools and parses no calls with the tool choice `none`."""
    response = asyncio.create_task(http.post(CHAT, json={**REQUEST, "tool_choice": choice}))
    request = await qwen.submitted.get()
    prompt = qwen.tokenizer.decode(request.prompt_ids)
    qwen.emit(request, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', last=True)
    (rendered,) = (await response).json()["choices"]
    assert ("<tools>" in prompt) == (choice != "none")
    assert ("tool_calls" in rendered["message"]) == (choice != "none")
    assert rendered["finish_reason"] == ("stop" if choice == "none" else "tool_calls")


F = {"name": "f"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {**F, "parameters": [1]}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {**F, "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}},
     "tool_choice.function.name"),
    ({"tool_choice": {"type": "browser"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"type": "function"}]}]},
     "messages[1].tool_calls[0]"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f"}}]}]},
     "messages[1].tool_calls[0].function"),
]  # fmt: skip


async def test_malformed_tool_is_400_and_named(http: httpx.AsyncClient) -> None:
    """The server rejects malformed tools, choices and calls with 400 and names the path."""
    wrong = []
    for fields, param in BAD:
        response = await http.post(CHAT, json={**REQUEST, **fields})
        error = response.json().get("error", {})
        if (response.status_code, error.get("param")) != (400, param):
            wrong.append((fields, response.status_code, error))
    assert wrong == []


async def test_without_a_tool_prompt_a_model_without_tools_rejects_them(tmp_path: Path) -> None:
    """With `--no-tool-prompt`, the server rejects tools that the model's template would ignore."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    cases = [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]},
         "messages[1].tool_calls"),
    ]  # fmt: skip
    model = with_template(tmp_path / "model", "chatml")
    settings = {"model": str(model), "no_tool_prompt": True}
    async with running(**settings) as gateway, client(gateway) as http:
        for fields, param in cases:
            response = await http.post(CHAT, json={"messages": HI, **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["code"] == "unsupported_parameter"
        fine = {"messages": HI, "max_tokens": 1, "tools": TOOLS, "tool_choice": "none"}
        assert (await http.post(CHAT, json=fine)).status_code == 200


async def test_simulator_makes_forced_calls(tmp_path: Path) -> None:
    """The simulator's calls satisfy the schemas of their functions."""
    model = with_template(tmp_path / "model", "qwen2_5")
    async with running(model=str(model)) as gateway, client(gateway) as http:
        body = {**REQUEST, "tool_choice": "required", "n": 4, "parallel_tool_calls": False}
        response = await http.post(CHAT, json=body)
        for choice in response.json()["choices"]:
            (call,) = choice["message"]["tool_calls"]
            if call["function"]["name"] == "weather":
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])


@needs_engine
@pytest.mark.parametrize("template", ["qwen2_5", "mistral_v3_tekken", "llama3_1"])
async def test_forced_call_satisfies_its_schema(tmp_path: Path, template: str) -> None:
    """The tool choices `required` and a named function force a call that satisfies its schema."""
    model = with_template(tmp_path / "model", template)
    named = {"type": "function", "function": {"name": "weather"}}
    settings = {"backend": "engine", "model": str(model), "kv_bytes": 32 << 20, "threads": 1}
    schema = WEATHER["function"]["parameters"]
    async with (
        running(**settings) as gateway,
        openai_client(gateway.url) as api,
    ):
        request_body = {
            "model": gateway.node.served.name, "messages": HI, "max_tokens": 400, "n": 3,
            "temperature": 1.5, "tools": TOOLS, "parallel_tool_calls": False,
        }  # fmt: skip
        for choice in ("required", named):
            for seed in range(3):
                response = await api.chat.completions.create(
                    **request_body, tool_choice=choice, seed=seed
                )
                for item in response.choices:
                    assert (item.finish_reason, item.message.content) == ("tool_calls", None)
                    (call,) = item.message.tool_calls
                    arguments = json.loads(call.function.arguments)
                    if call.function.name == "weather":
                        jsonschema.validate(arguments, schema)
                    else:
                        assert (choice, call.function.name, arguments) == ("required", "now", {})


@needs_engine
async def test_schema_that_cannot_be_enforced_is_rejected(tmp_path: Path) -> None:
    """The server rejects a tool schema that it cannot enforce before the stream begins."""
    model = with_template(tmp_path / "model", "qwen2_5")
    parameters = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    settings = {"backend": "engine", "model": str(model), "kv_bytes": 32 << 20, "threads": 1}
    async with running(**settings) as gateway, client(gateway) as http:
        body = {"messages": HI, "tools": [tool], "tool_choice": "required", "stream": True}
        response = await http.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "contains" in response.json()["error"]["message"]
