"""Tests of `/v1/responses` with OpenAI's client, its strict types and a scripted worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.app import Listening
from draftgate.gateway.http.requests.decoding import client_name
from draftgate.gateway.http.requests.responses import PARAMS
from tests.gateway.clients import openai_client
from tests.gateway.harness import ScriptedBackend, needs_engine, running
from tests.gateway.tool_models import NOW, WEATHER

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "strict": None, **tool["function"]} for tool in (WEATHER, NOW)]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


@pytest.fixture
async def api(node: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the node."""
    async with openai_client(node.url) as opened:
        yield opened


def send_request(http: httpx.AsyncClient, **fields: Any) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post(PATH, json={"input": "hi", **fields}))


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream after validating each event with OpenAI's types."""
    events = []
    *blocks, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def stream_steps(
    backend: ScriptedBackend, http: httpx.AsyncClient, steps: list[str], **fields: Any
) -> list[dict[str, Any]]:
    """Return the events of a response that consists of these steps."""
    response = send_request(http, stream=True, **fields)
    request = await backend.submitted.get()
    for step in steps:
        backend.emit(request, step, last=step is steps[-1])
        await asyncio.sleep(0)
    return parse_events((await response).text)


async def test_streamed_text_has_openais_sequence_of_events(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A text stream has OpenAI's sequence of events, and the last event contains the whole
    response."""
    events = await stream_steps(qwen, http, ["Good ", "day."])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(e.get("delta", "") for e in events) == "Good day."
    last = events[-1]["response"]
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("completed", "Good day.")
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + 2
    assert last["metrics"]["speculative_decoding"]["policy"] == "auto"
    assert events[3]["part"]["text"] == ""  # the event has the text at its time, not the final text


async def test_whole_response_satisfies_openais_type(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A whole response satisfies OpenAI's type and repeats fields of the request."""
    response = send_request(
        http, store=False, metadata={"k": "v"}, temperature=0.5, user="u", tools=TOOLS,
        instructions="Be brief.", max_output_tokens=9,
    )  # fmt: skip
    request = await qwen.submitted.get()
    qwen.emit(request, "Yes.", last=True)
    body = (await response).json()
    parsed = Response.model_validate(body)
    assert parsed.output_text == "Yes."
    assert (body["store"], body["metadata"], body["temperature"]) == (False, {"k": "v"}, 0.5)
    assert (body["instructions"], body["max_output_tokens"]) == ("Be brief.", 9)
    assert [tool["name"] for tool in body["tools"]] == ["weather", "now"]
    assert "Be brief." in qwen.tokenizer.decode(request.prompt_ids)
    assert body["incomplete_details"] is body["error"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_response_cut_by_its_length_is_incomplete(
    qwen: ScriptedBackend, http: httpx.AsyncClient, stream: bool
) -> None:
    """A response at its length limit and its item have the status `incomplete`."""
    response = send_request(http, stream=stream, max_output_tokens=1)
    request = await qwen.submitted.get()
    last = Delta(0, (1,), "Half", (), FinishReason.LENGTH)
    qwen.sinks.deliver([(request.request_id, last)])
    if stream:
        *_, end = parse_events((await response).text)
        assert end["type"] == "response.incomplete"
        body = end["response"]
    else:
        body = (await response).json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert body["output"][0]["status"] == "incomplete"


async def test_worker_failure_ends_the_stream_with_response_failed(
    qwen: ScriptedBackend, api: AsyncOpenAI
) -> None:
    """A stream ends with one `response.failed` event when the worker fails."""
    opening = asyncio.create_task(api.responses.create(model="scripted", input="x", stream=True))
    request = await qwen.submitted.get()
    qwen.emit(request, "half")
    stream = aiter(await opening)
    while (await anext(stream)).type != "response.output_text.delta":
        pass
    qwen.crash("device lost")
    rest = [event async for event in stream]
    assert [event.type for event in rest] == ["response.failed"]
    assert rest[0].response.error.code == "server_error"
    assert "device lost" in rest[0].response.error.message
    with pytest.raises(openai.InternalServerError) as refused:
        await api.responses.create(model="scripted", input="x", stream=True)
    assert refused.value.code == "worker_failed"


async def test_text_and_calls_are_separate_items(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The stream completes each text or call item before the next item begins."""
    steps = ["Well. <tool", CALL[5:40], CALL[40:] + CALL]
    events = await stream_steps(qwen, http, steps, tools=TOOLS)
    kinds = [event["type"].removeprefix("response.") for event in events]
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["type"] for item in added] == ["message", "function_call", "function_call"]
    assert [item.get("arguments") for item in added] == [None, "", ""]
    opened = [k for k in kinds if k in {"output_item.added", "output_item.done"}]
    assert opened == ["output_item.added", "output_item.done"] * 3
    arguments = "".join(
        e["delta"] for e in events
        if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 1
    )  # fmt: skip
    assert json.loads(arguments) == {"city": "Rome", "days": 1}
    message, *calls = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Well."
    assert [(c["name"], c["arguments"]) for c in calls] == [("weather", arguments)] * 2
    assert len({c["call_id"] for c in calls}) == 2


async def test_openais_stream_helper_accepts_the_events(
    qwen: ScriptedBackend, api: AsyncOpenAI
) -> None:
    """The stream helper of OpenAI's client accepts the events and builds the final response."""

    async def read_stream() -> Any:
        async with api.responses.stream(model="scripted", input="x", tools=TOOLS) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    response = asyncio.create_task(read_stream())
    request = await qwen.submitted.get()
    qwen.emit(request, "Well. ")
    qwen.emit(request, CALL, last=True)
    final = await response
    assert final.output_text == "Well."
    assert final.output[1].name == "weather"


async def test_input_items_make_the_prompt_of_the_equivalent_chat(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The input items of a response give the same prompt as the equivalent chat messages."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"days": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c2", "output": "sunny"},
    ]  # fmt: skip

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function",
                "function": {"name": name, "arguments": arguments}}  # fmt: skip

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Wait.",
         "tool_calls": [call("c1", "now", "{}"), call("c2", "weather", '{"days": 1}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
    ]  # fmt: skip
    prompts = []
    for path, body in (
        (PATH, {"input": items, "instructions": "Be brief.", "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": messages, "tools": [WEATHER, NOW]}),
    ):
        response = asyncio.create_task(http.post(path, json={**body, "max_tokens": 5}))
        request = await qwen.submitted.get()
        qwen.emit(request, "ok", last=True)
        assert (await response).status_code == 200
        prompts.append(request.prompt_ids)
    assert prompts[0] == prompts[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "",
                 "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": "x", "output": [{"type": "input_image"}]}]},
     "input[0].output[0].type"),
    ({"input": [{"type": "reasoning", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]},
     "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": "a b " * 2000}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": [1]}}},
     "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"metadata": {"k": 5}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"include": ["everything"]}, "include[0]"),
    ({"include": ["message.output_text.logprobs"], "tools": TOOLS}, "include"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"truncation": "some"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 3, "tools": TOOLS}, "top_logprobs"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"presence_penalty": 3}, "presence_penalty"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_malformed_field_is_400_under_the_endpoints_own_name(
    http: httpx.AsyncClient, stream: bool
) -> None:
    """The server rejects malformed fields with 400 and uses the field names of this endpoint."""
    wrong = []
    for fields, param in BAD:
        response = await http.post(PATH, json={"input": "x", "stream": stream, **fields})
        error = response.json().get("error", {})
        named = param in error["message"] or error["code"] == "context_length_exceeded"
        if (response.status_code, error.get("param"), named) != (400, param, True):
            wrong.append((fields, response.status_code, error))
    assert wrong == []


async def test_neutral_values_are_accepted(qwen: ScriptedBackend, http: httpx.AsyncClient) -> None:
    """The server accepts neutral values of unsupported fields."""
    response = send_request(
        http, background=False, include=[], previous_response_id=None, truncation="disabled",
        reasoning={"effort": None, "summary": None}, text={"format": {"type": "text"}},
        tools=[], top_logprobs=0, service_tier="auto", prompt_cache_key="k",
    )  # fmt: skip
    qwen.emit(await qwen.submitted.get(), "ok", last=True)
    assert (await response).status_code == 200


@given(st.text(max_size=30))
def test_other_parameter_names_are_unchanged(name: str) -> None:
    """The endpoint renames only the parameters with a different name in chats."""
    if not name.startswith((*PARAMS, "tools[", "tool_choice.function")):
        assert client_name(name, PARAMS) == name
    assert client_name(name, {}) == name


class Port(BaseModel):
    """The model that `parse` returns."""

    port: int


@needs_engine
async def test_responses_parse_returns_a_pydantic_model() -> None:
    """The method `parse` returns an instance of the model, and bad schemas are named
    `text.format`."""
    async with (
        running(backend="engine", kv_bytes=32 << 20, threads=1) as gateway,
        openai_client(gateway.url) as api,
    ):
        name = gateway.node.served.name
        parsed = await api.responses.parse(
            model=name, input="port =", text_format=Port, max_output_tokens=60, temperature=0
        )
        assert isinstance(parsed.output_parsed, Port) or parsed.status == "incomplete"
        schema = {"type": "array", "uniqueItems": True}
        strict = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model=name, input="x", text={"format": strict})
        assert refused.value.param == "text.format"
        response = await api.responses.create(
            model=name, input="def add(a, b):", max_output_tokens=12, extra_body={"seed": 3}
        )
        chat = await api.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "def add(a, b):"}], max_tokens=12,
            seed=3,
        )  # fmt: skip
        assert response.output_text == chat.choices[0].message.content
