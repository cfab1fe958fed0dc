"""OpenAI's client for Python, with its helpers for streams, functions and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from common import CALL, MESSAGES, SCHEMA, WEATHER
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

DEMO: dict[str, Any] = {"model": "draftgate-demo", "max_tokens": 60, "temperature": 0}
RESPONSE: dict[str, Any] = {"model": "draftgate-demo", "input": "Hello", "temperature": 0}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
USER = [{"role": "user", "content": CALL}]
ROME = {"city": "Rome", "days": 2}


class Forecast(BaseModel):
    """Returns the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture
def demo(shipped: str) -> Iterator[OpenAI]:
    """A client of the shipped model."""
    with OpenAI(base_url=shipped, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def told(scripted: str) -> Iterator[OpenAI]:
    """A client of the scripted model."""
    with OpenAI(base_url=scripted, api_key="none", max_retries=0) as client:
        yield client


def test_models(demo: OpenAI) -> None:
    """Models are listed and can be retrieved."""
    assert [model.id for model in demo.models.list()] == ["draftgate-demo"]
    assert demo.models.retrieve("draftgate-demo").object == "model"
    with pytest.raises(openai.NotFoundError):
        demo.models.retrieve("unknown")


def test_chat_has_choices_log_probabilities_and_usage(demo: OpenAI) -> None:
    """A chat has all choices, one log probability per token, and the usage."""
    request = {**DEMO, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2}
    found = demo.chat.completions.create(**request, messages=MESSAGES)
    assert [len(choice.logprobs.content) for choice in found.choices] == [8, 8]
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 16


def test_streamed_events_add_up_to_the_chat(demo: OpenAI) -> None:
    """The events of a stream and its accumulated chat equal the whole chat."""
    full = demo.chat.completions.create(**DEMO, messages=MESSAGES).choices[0].message.content
    request = {**DEMO, "messages": MESSAGES, "stop": full[12:15]}  # `length` raises an error
    whole = demo.chat.completions.create(**request)
    text = ""
    with demo.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        for event in stream:
            text += event.delta if event.type == "content.delta" else ""
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage.total_tokens == whole.usage.total_tokens


async def test_asynchronous_client_leaves_a_stream(shipped: str) -> None:
    """The asynchronous client can close a stream, and can send another request afterwards."""
    async with AsyncOpenAI(base_url=shipped, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**DEMO, messages=MESSAGES, stream=True)
        async with stream:
            first = await anext(aiter(stream))
        assert first.object == "chat.completion.chunk"
        again = await client.chat.completions.create(**DEMO, messages=MESSAGES)
        assert again.choices[0].message.content


def test_parsed_chat(demo: OpenAI) -> None:
    """A parsed chat has an object of the class."""
    found = demo.chat.completions.parse(**DEMO, messages=MESSAGES, response_format=Forecast)
    assert isinstance(found.choices[0].message.parsed, Forecast)


def test_parsed_stream(demo: OpenAI) -> None:
    """The accumulated chat of a stream has an object of the class."""
    request = {**DEMO, "messages": MESSAGES, "response_format": Forecast}
    with demo.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Forecast)


def test_json_mode(demo: OpenAI) -> None:
    """The content of a chat in JSON mode is the beginning of a JSON object."""
    format_ = {"type": "json_object"}
    found = demo.chat.completions.create(**DEMO, messages=MESSAGES, response_format=format_)
    assert found.choices[0].message.content.lstrip().startswith("{")


def test_forced_call(demo: OpenAI) -> None:
    """A forced call has arguments of the schema."""
    request = {**DEMO, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": FORCED}
    (call,) = demo.chat.completions.create(**request).choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in SCHEMA["properties"]["city"]["enum"]
    assert 1 <= arguments["days"] <= 9


def test_parsed_call_and_its_result(told: OpenAI) -> None:
    """A call is parsed, and its result becomes part of the next prompt."""
    tools = [openai.pydantic_function_tool(Forecast, name="get_weather")]
    first = told.chat.completions.parse(model="scripted", messages=USER, tools=tools)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == Forecast(**ROME)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    messages = [*USER, message, result]
    second = told.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert second.choices[0].message.content == "The tool says: It is sunny."


def test_streamed_call(told: OpenAI) -> None:
    """The pieces of the arguments add up to those of the call."""
    tools = [openai.pydantic_function_tool(Forecast, name="get_weather")]
    with told.chat.completions.stream(model="scripted", messages=USER, tools=tools) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == ROME
    assert call.function.parsed_arguments == Forecast(**ROME)


def test_completion_and_its_stream(demo: OpenAI) -> None:
    """A completion continues its prompt, and a stream has the same text."""
    request = {**DEMO, "prompt": "def add(a, b):", "max_tokens": 8}
    whole = demo.completions.create(**request, echo=True, logprobs=1).choices[0].text
    assert whole.startswith(request["prompt"])
    assert len(whole) > len(request["prompt"])
    chunks = demo.completions.create(**request, stream=True)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert request["prompt"] + text == whole


def test_embeddings(demo: OpenAI) -> None:
    """Embeddings have the same values in both encodings. The client asks for base64."""
    request = {"model": "draftgate-demo", "input": ["a", "b"]}
    encoded = demo.embeddings.create(**request).data
    plain = demo.embeddings.create(**request, encoding_format="float").data
    assert len(encoded) == 2
    for one, other in zip(encoded, plain, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_embeddings_of_a_model_without_them_are_refused(told: OpenAI) -> None:
    """The client raises an error for a worker that cannot embed texts."""
    with pytest.raises(openai.BadRequestError, match="embedding"):
        told.embeddings.create(model="scripted", input="a")


def test_parsed_response(demo: OpenAI) -> None:
    """A parsed response has an object of the class."""
    found = demo.responses.parse(**RESPONSE, max_output_tokens=60, text_format=Forecast)
    assert found.status == "completed"
    assert isinstance(found.output_parsed, Forecast)


def test_streamed_response(demo: OpenAI) -> None:
    """The events of a stream add up to the text of the final response, which is parsed."""
    with demo.responses.stream(**RESPONSE, max_output_tokens=60, text_format=Forecast) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text
    assert isinstance(final.output_parsed, Forecast)


def test_incomplete_response(demo: OpenAI) -> None:
    """A stream that reaches the limit ends with `response.incomplete` and the text so far."""
    *events, last = demo.responses.create(**RESPONSE, max_output_tokens=16, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text


def test_call_of_a_response_and_its_output(told: OpenAI) -> None:
    """A response calls a function, and the output of the function continues the response."""
    tools = [openai.pydantic_function_tool(Forecast, name="get_weather")["function"]]
    tools = [{"type": "function", **tool} for tool in tools]
    first = told.responses.parse(model="scripted", input=CALL, tools=tools)
    (item,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(item.arguments) == ROME
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
    second = told.responses.create(
        model="scripted", input=[output], tools=tools, previous_response_id=first.id
    )
    assert second.output_text == "The tool says: Sunny."


def test_stored_response(told: OpenAI) -> None:
    """A stored response can be retrieved, listed and deleted."""
    created = told.responses.create(model="scripted", input="Answer yes")
    assert told.responses.retrieve(created.id).output_text == "yes"
    items = told.responses.input_items.list(created.id)
    assert [item.type for item in items] == ["message"]
    told.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        told.responses.retrieve(created.id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_errors_have_the_clients_types(demo: OpenAI, stream: bool) -> None:
    """Errors have the class, code and parameter of the client, also before a stream begins."""
    request = {**DEMO, "messages": MESSAGES, "stream": stream}
    with pytest.raises(openai.BadRequestError) as bad:
        demo.chat.completions.create(**{**request, "top_p": 2})
    assert (bad.value.param, bad.value.code) == ("top_p", "invalid_value")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        demo.chat.completions.create(**{**request, "model": "unknown"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        demo.chat.completions.create(**{**request, "max_tokens": 100_000})
    assert long.value.code == "context_length_exceeded"
