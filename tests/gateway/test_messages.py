"""Tests of `/v1/messages` with Anthropic's client, its types and a scripted worker."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import TypeAdapter

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest
from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, accepted_request, client, running
from tests.gateway.tool_models import ANTHROPIC_TOOLS, TOOLS, with_template

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PATH, COUNT_PATH, CHAT_PATH = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
CUT_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


async def exchange(
    backend: ScriptedBackend,
    http: httpx.AsyncClient,
    steps: list[str],
    end: FinishReason = FinishReason.STOP,
    stop_text: str = "",
    cached_tokens: int = 0,
    **fields: Any,
) -> tuple[GenerationRequest, httpx.Response]:
    """Send a request, and return the worker's request and the response to these steps."""
    body = {"messages": HI, "max_tokens": 50, **fields}
    response = asyncio.create_task(http.post(PATH, json=body))
    request = await accepted_request(backend, response)
    for step in steps:
        backend.emit(request, step)
        await asyncio.sleep(0)
    last = Delta(0, (1,), "", (), end, None, cached_tokens, stop_text=stop_text)
    backend.sinks.deliver([(request.request_id, last)])
    return request, await response


@cache
def event_type() -> TypeAdapter[Any]:
    """Return Anthropic's type of an event."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def parse_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream after validating each event with Anthropic's types."""
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event_type().validate_python(event)
        events.append(event)
    return events


async def test_streamed_text_has_anthropics_sequence_of_events(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A text stream has Anthropic's sequence of events. The last events have the usage and the
    metrics."""
    request, response = await exchange(qwen, http, ["Good ", "day."], stream=True, cached_tokens=3)
    begin, *middle, last, _ = events = parse_events(response)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start",
        *["content_block_delta"] * (len(middle) - 2),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(e["delta"]["text"] for e in middle[1:-1]) == "Good day."
    assert (begin["message"]["content"], begin["message"]["stop_reason"]) == ([], None)
    assert begin["message"]["usage"]["input_tokens"] == len(request.prompt_ids)
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == {
        "input_tokens": len(request.prompt_ids) - 3, "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0, "output_tokens": 3,
    }  # fmt: skip
    assert last["metrics"]["speculative_decoding"]["policy"] == "auto"


async def test_whole_message_satisfies_anthropics_type(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A whole message satisfies Anthropic's type, and reports usage and metrics."""
    from anthropic.types import Message

    request, response = await exchange(
        qwen, http, ["Yes."], cached_tokens=2, system="Be brief.", top_k=5, top_p=0.5,
        temperature=0.25, seed=7, stop_sequences=["END", ""], metadata={"user_id": "u"},
        thinking={"type": "disabled"}, speculation={"mode": "off"},
    )  # fmt: skip
    message = Message.model_validate(response.json(), strict=True)
    assert (message.content[0].text, message.stop_reason) == ("Yes.", "end_turn")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt_ids)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (2, 2)
    metrics = response.json()["metrics"]
    assert (metrics["seed"], metrics["speculative_decoding"]["mode"]) == (7, "off")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop) == (50, ("END",))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("steps", "end", "stop_text", "reason"),
    [
        (["Half"], FinishReason.LENGTH, "", "max_tokens"),
        (["Half"], FinishReason.STOP, "END", "stop_sequence"),
        (["Half"], FinishReason.STOP, "", "end_turn"),
        ([CALL], FinishReason.STOP, "", "tool_use"),
        ([CUT_CALL], FinishReason.LENGTH, "", "max_tokens"),
    ],
)
async def test_stop_reason_names_the_end_of_the_output(
    qwen: ScriptedBackend, http: httpx.AsyncClient, stream: bool,
    steps: list[str], end: FinishReason, stop_text: str, reason: str,
) -> None:  # fmt: skip
    """The stop reason says why the output ended, and the stop sequence is named."""
    _, response = await exchange(
        qwen, http, steps, end, stop_text, stream=stream, tools=ANTHROPIC_TOOLS
    )
    found = parse_events(response)[-2]["delta"] if stream else response.json()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop_text or None)


async def test_stop_sequence_of_the_worker_is_named(sim: Listening) -> None:
    """The worker reports which of several stop sequences has ended the text."""
    body = {"messages": HI, "max_tokens": 200, "seed": 3}
    async with client(sim) as http:
        text = (await http.post(PATH, json=body)).json()["content"][0]["text"]
        stops = ["not in the text", text[40:44]]
        stopped = (await http.post(PATH, json={**body, "stop_sequences": stops})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[40:44])
    assert stopped["content"][0]["text"] == text[: text.index(text[40:44])]


async def test_client_streams_text_and_calls(
    qwen: ScriptedBackend, anthropic_api: AsyncAnthropic
) -> None:
    """Anthropic's stream helper builds the message from the events, with the inputs of calls."""

    async def read_stream() -> Any:
        async with anthropic_api.messages.stream(
            model="scripted", max_tokens=50, messages=HI, tools=ANTHROPIC_TOOLS
        ) as stream:
            return await stream.get_final_message()

    response = asyncio.create_task(read_stream())
    request = await qwen.submitted.get()
    for part in ("Well. <tool", CALL[5:40], CALL[40:] + CALL):
        qwen.emit(request, part)
    qwen.emit(request, "", last=True)
    message = await response
    text, *calls = message.content
    assert (text.text, message.stop_reason) == ("Well.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"city": "Rome", "days": 1})
    ] * 2
    assert len({call.id for call in calls}) == 2


async def test_agent_sends_the_message_and_the_result_back(
    qwen: ScriptedBackend, anthropic_api: AsyncAnthropic
) -> None:
    """A client continues with the server's own message and the result of its call."""
    fields = {"model": "scripted", "max_tokens": 50, "tools": ANTHROPIC_TOOLS}
    first = asyncio.create_task(anthropic_api.messages.create(messages=HI, **fields))
    qwen.emit(await qwen.submitted.get(), CALL, last=True)
    (call,) = (message := await first).content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*HI, {"role": "assistant", "content": message.content}]
    history.append({"role": "user", "content": [result, {"type": "text", "text": "And?"}]})
    second = asyncio.create_task(anthropic_api.messages.create(messages=history, **fields))
    request = await qwen.submitted.get()
    qwen.emit(request, "Sunny.", last=True)
    assert (await second).content[0].text == "Sunny."
    prompt = qwen.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert CALL in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert prompt.index("sunny") < prompt.index("And?")


async def test_cut_call_is_accepted_back(qwen: ScriptedBackend, http: httpx.AsyncClient) -> None:
    """Arguments that are not a JSON object return as `INVALID_JSON`, and the client can send them
    back."""
    cut = {"end": FinishReason.LENGTH, "tools": ANTHROPIC_TOOLS}
    _, response = await exchange(qwen, http, [CUT_CALL], **cut)
    (call,) = content = response.json()["content"]
    assert call["input"] == {"INVALID_JSON": '{"city": "Ro'}
    result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": True}
    history = [*HI, {"role": "assistant", "content": content}]
    history.append({"role": "user", "content": [result]})
    request, _ = await exchange(qwen, http, ["ok"], messages=history, tools=ANTHROPIC_TOOLS)
    assert CUT_CALL in qwen.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_blocks_make_the_prompt_of_the_equivalent_chat(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The blocks of a conversation give the same prompt as the equivalent chat, and its count."""
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"days": 1}}
    result = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    body = {
        "system": [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                   {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, call]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": result},
                {"type": "text", "text": "And"}, {"type": "text", "text": "?"}]},
            {"role": "system", "content": "Now."},
            {"role": "user", "content": "Go."},
        ],
        "tools": ANTHROPIC_TOOLS,
        "max_tokens": 5,
    }  # fmt: skip
    function = {"name": "weather", "arguments": '{"days": 1}'}
    now = {**TOOLS[1]["function"], "parameters": {"type": "object"}}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Wait.",
             "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "user", "content": "And?"},
            {"role": "system", "content": "Now."},
            {"role": "user", "content": "Go."},
        ],
        "tools": [TOOLS[0], {"type": "function", "function": now}],
        "max_tokens": 5,
    }  # fmt: skip
    prompts = []
    for path, sent in ((PATH, body), (CHAT_PATH, chat)):
        response = asyncio.create_task(http.post(path, json=sent))
        request = await accepted_request(qwen, response)
        qwen.emit(request, "ok", last=True)
        assert (await response).status_code == 200
        prompts.append(request.prompt_ids)
    assert prompts[0] == prompts[1]
    counted = await http.post(COUNT_PATH, json=body)
    assert counted.json() == {"input_tokens": len(prompts[0])}


@pytest.mark.parametrize(
    ("choice", "grammar", "shown"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "now"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
async def test_tool_choice_forces_or_hides_tools(
    qwen: ScriptedBackend, http: httpx.AsyncClient, choice: Any, grammar: bool, shown: bool
) -> None:
    """The choices `any` and `tool` force a call, and `none` hides the tools from the model."""
    request, _ = await exchange(qwen, http, ["ok"], tools=ANTHROPIC_TOOLS, tool_choice=choice)
    assert (request.grammar is not None) is grammar
    assert ("Returns the weather." in qwen.tokenizer.decode(request.prompt_ids)) is shown
    if choice == {"type": "tool", "name": "now"}:
        assert "now" in request.grammar.text
        assert "weather" not in request.grammar.text


async def test_parallel_calls_can_be_disabled(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """With `disable_parallel_tool_use`, only the first call is a block of its own."""
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    fields = {"tools": ANTHROPIC_TOOLS, "tool_choice": choice}
    _, response = await exchange(qwen, http, [CALL + CALL], **fields)
    kinds = [block["type"] for block in response.json()["content"]]
    assert kinds.count("tool_use") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_reasoning_becomes_a_thinking_block(
    scripted: ScriptedBackend, tmp_path: Path, stream: bool
) -> None:
    """A model that marks its reasoning returns thinking blocks, which the client can send back."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "qwen3", "qwen3"))
    scripted.kv_tokens = 1000
    steps = list("<think>\nLet me see.\n</think>\n\nNoon.")
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        request, response = await exchange(scripted, http, steps, thinking=thinking, stream=stream)
        if stream:
            blocks = [e["content_block"] for e in parse_events(response) if "content_block" in e]
            deltas = [e for e in parse_events(response) if e["type"] == "content_block_delta"]
            for event in deltas:
                added = {k: v for k, v in event["delta"].items() if k != "type"}
                for field, text in added.items():
                    blocks[event["index"]][field] += text
        else:
            blocks = response.json()["content"]
        assert blocks == [
            {"type": "thinking", "thinking": "Let me see.", "signature": ""},
            {"type": "text", "text": "Noon."},
        ]
        redacted = {"type": "redacted_thinking", "data": "x"}
        result = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
        history = [*HI, {"role": "assistant", "content": [blocks[0], redacted, result]}]
        answer = {"type": "tool_result", "tool_use_id": "c", "content": "12:00"}
        history.append({"role": "user", "content": [answer]})
        off = {"thinking": {"type": "disabled"}, "tools": ANTHROPIC_TOOLS, "messages": history}
        request, _ = await exchange(scripted, http, ["Noon."], **off)
        prompt = scripted.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        assert "<think>\nLet me see.\n</think>" in prompt
        assert prompt.endswith("<think>\n\n</think>\n\n")


async def test_output_format_constrains_the_text(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A schema in `output_config` becomes the grammar of the output."""
    schema = {"type": "object", "properties": {"port": {"type": "integer"}}}
    output = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    request, _ = await exchange(qwen, http, ["{}"], output_config=output)
    assert json.loads(request.grammar.text) == schema


async def test_tool_runner_continues_without_threads(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The error for `thread` has the code after which clients send all messages."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        body = {"messages": HI, "max_tokens": 5, "thread": thread}
        response = await http.post(PATH, params={"beta": "true"}, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"] == "thread is not supported: send all messages"
        assert error["details"] == {
            "error_code": "thread_unsupported_request", "unsupported": ["thread"],
        }  # fmt: skip
    _, plain = await exchange(qwen, http, ["ok"], thread=None)
    assert plain.status_code == 200


async def test_silent_streams_have_pings(
    qwen: ScriptedBackend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for its first token sends `ping` events."""
    monkeypatch.setattr("draftgate.gateway.http.stream.KEEPALIVE_S", 0.001)
    body = {"messages": HI, "max_tokens": 5, "stream": True}
    async with http.stream("POST", PATH, json=body) as response:
        lines = response.aiter_lines()
        assert [await anext(lines), await anext(lines)] == [
            "event: ping",
            'data: {"type":"ping"}',
        ]
        qwen.emit(await qwen.submitted.get(), "ok", last=True)
        rest = [line async for line in lines]
    assert rest[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']
