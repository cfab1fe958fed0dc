"""Function calls over HTTP: parsed from a scripted worker, forced on the engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from tests.gateway.harness import ScriptedBackend, client, events, running
from tests.gateway.tool_models import NOW, TOOLS, WEATHER, with_template

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Weather in Paris?"}]
ASK = {"messages": HI, "max_tokens": 200, "tools": TOOLS}
ANSWER = [
    "Let me see.\n<tool_",
    'call>\n{"name": "weather", "argum',
    'ents": {"city": "Pa',
    'ris", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}',
    "\n</tool_call>",
]
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or not (SHIPPED_MODEL / "model.safetensors").is_file(),
    reason="needs torch and the shipped model",
)


@pytest.fixture
def qwen(scripted: ScriptedBackend, tmp_path: Path) -> ScriptedBackend:
    """A worker whose model has Qwen's template."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", "qwen2_5"))
    scripted.kv_tokens = 1000
    return scripted


@pytest.fixture
async def api(qwen: ScriptedBackend) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of a node with that worker."""
    async with (
        running(backends=[qwen]) as where,
        AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


@pytest.fixture
async def http(qwen: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client of such a node."""
    async with running(backends=[qwen]) as where, client(where) as opened:
        yield opened


async def play(backend: ScriptedBackend, steps: list[str], **options: Any) -> None:
    """Answer the next request with these steps."""
    request = await backend.submitted.get()
    for step in steps:
        backend.emit(request, step, last=step is steps[-1], **options)
        await asyncio.sleep(0)


async def test_whole_answer_has_text_calls_and_finish_reason(
    qwen: ScriptedBackend, api: AsyncOpenAI
) -> None:
    """Calls have ids and JSON arguments, and the finish reason is `tool_calls`."""
    answer = asyncio.create_task(api.chat.completions.create(model="scripted", **ASK))
    await play(qwen, ANSWER)
    (choice,) = (await answer).choices
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
    """The result equals the whole answer."""

    async def streamed() -> Any:
        async with api.chat.completions.stream(model="scripted", **ASK) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    answer = asyncio.create_task(streamed())
    await play(qwen, ANSWER)
    (choice,) = (await answer).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    called = [c.function for c in choice.message.tool_calls]
    assert [(f.name, json.loads(f.arguments)) for f in called] == [
        ("weather", {"city": "Paris", "days": 2}),
        ("now", {}),
    ]


async def test_streamed_call_begins_with_id_and_name(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """Further parts have arguments as they are written."""
    answer = asyncio.create_task(http.post(CHAT, json={**ASK, "stream": True}))
    await play(qwen, ANSWER)
    chunks = events((await answer).text)[:-1]
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
    """Unknown functions, half a tag and bare JSON are content, and the finish reason is `stop`."""
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call> {"name": "now"} <tool_ca'
    for stream in (False, True):
        answer = asyncio.create_task(http.post(CHAT, json={**ASK, "stream": stream}))
        await play(qwen, [text[:40], text[40:]])
        if stream:
            choices = [c for e in events((await answer).text)[:-1] for c in e["choices"]]
            said = "".join(c["delta"].get("content", "") for c in choices)
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = (await answer).json()["choices"]
            said, reason = choice["message"]["content"], choice["finish_reason"]
            assert "tool_calls" not in choice["message"]
        assert (said, reason) == (text, "stop")


async def test_choices_have_separate_calls_and_ids(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """Each choice is parsed separately."""
    answer = asyncio.create_task(http.post(CHAT, json={**ASK, "n": 2}))
    request = await qwen.submitted.get()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, last in ((call[:20], False), (call[20:], True)):
        for choice in (0, 1):
            qwen.emit(request, text, last=last, choice=choice)
    calls = [c["message"]["tool_calls"] for c in (await answer).json()["choices"]]
    assert [c["message"]["content"] for c in (await answer).json()["choices"]] == [None, None]
    assert [len(of_choice) for of_choice in calls] == [1, 1]
    assert calls[0][0]["id"] != calls[1][0]["id"]


async def test_prompt_has_tools_calls_and_results_in_qwens_format(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The template renders tools, the assistant's calls and their results."""
    function = {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = asyncio.create_task(http.post(CHAT, json={**ASK, "messages": messages}))
    request = await qwen.submitted.get()
    prompt = qwen.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    qwen.emit(request, "Sunny.", last=True)
    assert (await answer).status_code == 200
    asked = {"messages": messages, "tools": TOOLS}
    assert (await http.post("/tokenize", json=asked)).json()["tokens"] == list(request.prompt_ids)
    assert json.dumps(WEATHER) in prompt
    assert json.dumps(NOW) in prompt
    called = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
    assert f"<tool_call>\n{called}\n</tool_call>" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


SAID = {
    "qwen2_5": CALLED,
    "qwen3": f"<think>\nHm.\n</think>\n\n{CALLED}",
    "mistral_v2v3": '[{"name": "now", "arguments": {}}]',  # the marker leaves no text
    "mistral_v3_tekken": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "llama3_1": '{"name": "now", "parameters": {}}',
    "llama3_2": '{"name": "now", "parameters": {}}',
}


@pytest.mark.parametrize("template", SAID)
async def test_returned_call_can_be_sent_back(
    scripted: ScriptedBackend, tmp_path: Path, template: str
) -> None:
    """The template of every dialect accepts our ids."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", template))
    scripted.kv_tokens = 1000
    async with running(backends=[scripted]) as where, client(where) as http:
        answer = asyncio.create_task(http.post(CHAT, json=ASK))
        await play(scripted, [SAID[template]])
        message = (await answer).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}
        again = asyncio.create_task(
            http.post(CHAT, json={**ASK, "messages": [*HI, message, result]})
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
    """The answer is then never parsed for calls."""
    answer = asyncio.create_task(http.post(CHAT, json={**ASK, "tool_choice": choice}))
    request = await qwen.submitted.get()
    prompt = qwen.tokenizer.decode(request.prompt_ids)
    qwen.emit(request, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', last=True)
    (rendered,) = (await answer).json()["choices"]
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
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
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
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"type": "function"}]}]},
     "messages[1].tool_calls[0]"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
]  # fmt: skip


async def test_malformed_tool_is_400_and_named(http: httpx.AsyncClient) -> None:
    """Tools, choices and earlier calls are named by their path."""
    wrong = []
    for fields, param in BAD:
        answer = await http.post(CHAT, json={**ASK, **fields})
        error = answer.json().get("error", {})
        if (answer.status_code, error.get("param")) != (400, param):
            wrong.append((fields, answer.status_code, error))
    assert wrong == []


async def test_model_without_tools_refuses_them() -> None:
    """Its template would silently ignore them."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    cases = [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]},
         "messages[1].tool_calls"),
    ]  # fmt: skip
    async with running() as where, client(where) as http:
        for fields, param in cases:
            answer = await http.post(CHAT, json={"messages": HI, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["code"] == "unsupported_parameter"
        fine = {"messages": HI, "max_tokens": 1, "tools": TOOLS, "tool_choice": "none"}
        assert (await http.post(CHAT, json=fine)).status_code == 200


async def test_simulator_refuses_forced_calls(tmp_path: Path) -> None:
    """It has no logits; tools themselves are accepted."""
    model = with_template(tmp_path / "model", "qwen2_5")
    async with running(model=str(model)) as where, client(where) as http:
        if where.node.served.tokenizer.tool_template is None:
            pytest.fail("the simulator does not use the model's template")
        answer = await http.post(CHAT, json={**ASK, "tool_choice": "required"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools")
        assert "does not support structured output" in error["message"]


@needs_engine
@pytest.mark.parametrize("template", ["qwen2_5", "mistral_v3_tekken", "llama3_1"])
async def test_forced_call_satisfies_its_schema(tmp_path: Path, template: str) -> None:
    """Both `required` and a named function force valid calls."""
    model = with_template(tmp_path / "model", template)
    named = {"type": "function", "function": {"name": "weather"}}
    settings = {"backend": "engine", "model": str(model), "kv_bytes": 32 << 20, "threads": 1}
    schema = WEATHER["function"]["parameters"]
    async with (
        running(**settings) as where,
        AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as api,
    ):
        ask = {"model": where.node.served.name, "messages": HI, "max_tokens": 400, "n": 3,
               "temperature": 1.5, "tools": TOOLS, "parallel_tool_calls": False}  # fmt: skip
        for choice in ("required", named):
            for seed in range(3):
                answer = await api.chat.completions.create(**ask, tool_choice=choice, seed=seed)
                for one in answer.choices:
                    assert (one.finish_reason, one.message.content) == ("tool_calls", None)
                    (call,) = one.message.tool_calls
                    arguments = json.loads(call.function.arguments)
                    if call.function.name == "weather":
                        jsonschema.validate(arguments, schema)
                    else:
                        assert (choice, call.function.name, arguments) == ("required", "now", {})


@needs_engine
async def test_schema_that_cannot_be_enforced_is_refused(tmp_path: Path) -> None:
    """The error names the tool before a stream begins."""
    model = with_template(tmp_path / "model", "qwen2_5")
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    settings = {"backend": "engine", "model": str(model), "kv_bytes": 32 << 20, "threads": 1}
    async with running(**settings) as where, client(where) as http:
        body = {"messages": HI, "tools": [tool], "tool_choice": "required", "stream": True}
        answer = await http.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "uniqueItems" in answer.json()["error"]["message"]
