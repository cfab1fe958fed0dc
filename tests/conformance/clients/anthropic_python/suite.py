"""Anthropic's client for Python, with its helpers for streams, tools and structured output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from common import CALL, MESSAGES, SCHEMA
from pydantic import BaseModel, ConfigDict

DEMO: dict[str, Any] = {
    "model": "draftgate-demo",
    "max_tokens": 16,
    "messages": MESSAGES,
    "extra_body": {"temperature": 0},  # the client has no parameter for it
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "input_schema": SCHEMA,
}
TOLD: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": CALL}],
}
ROME = {"city": "Rome", "days": 2}
ANSWER = "The tool says: Rome is sunny for 2 days."
OPTIONS: dict[str, Any] = {"api_key": "none", "max_retries": 0}


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def root(url: str) -> str:
    """Return the URL of the server, to which the client adds `/v1`."""
    return url.removesuffix("/v1")


@pytest.fixture
def demo(shipped: str) -> Iterator[Anthropic]:
    """A client of the shipped model."""
    with Anthropic(base_url=root(shipped), **OPTIONS) as client:
        yield client


@pytest.fixture
def told(scripted: str) -> Iterator[Anthropic]:
    """A client of the scripted models."""
    with Anthropic(base_url=root(scripted), **OPTIONS) as client:
        yield client


@beta_tool
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city.
        days: number of days.
    """
    return f"{city} is sunny for {days} days."


def test_models(demo: Anthropic) -> None:
    """Models are listed in Anthropic's form, and can be retrieved."""
    (model,) = demo.models.list()
    assert (model.id, model.type) == ("draftgate-demo", "model")
    assert model.display_name
    assert model.created_at.year > 2020
    assert demo.models.retrieve("draftgate-demo") == model
    with pytest.raises(anthropic.NotFoundError):
        demo.models.retrieve("unknown")


def test_message_has_text_and_usage(demo: Anthropic) -> None:
    """A message has the text, why it ended, the usage and the id of the request."""
    found = demo.messages.create(**DEMO)
    assert found.content[0].text
    assert (found.role, found.stop_reason) == ("assistant", "max_tokens")
    assert found.usage.output_tokens == 16
    assert found.usage.input_tokens > 0
    assert found._request_id


def test_stop_sequence(demo: Anthropic) -> None:
    """The message names the sequence that ended it."""
    text = demo.messages.create(**DEMO).content[0].text
    found = demo.messages.create(**DEMO, stop_sequences=["never", text[8:11]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[8:11])
    assert found.content[0].text == text[:8]


def test_streamed_events_add_up_to_the_message(demo: Anthropic) -> None:
    """The texts, the events and the final message of a stream equal the whole message."""
    whole = demo.messages.create(**DEMO)
    with demo.messages.stream(**DEMO) as stream:
        text = "".join(event.text for event in stream if event.type == "text")
        final = stream.get_final_message()
        assert stream.request_id
    assert text == stream.get_final_text() == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 16)
    assert final.usage.input_tokens == whole.usage.input_tokens
    with demo.messages.stream(**DEMO) as stream:
        assert "".join(stream.text_stream) == text


async def test_asynchronous_client_leaves_a_stream(shipped: str) -> None:
    """The asynchronous client can close a stream, and can send another request afterwards."""
    async with AsyncAnthropic(base_url=root(shipped), **OPTIONS) as client:
        async with client.messages.stream(**DEMO) as stream:
            first = await anext(aiter(stream))
        assert first.type == "message_start"
        assert (await client.messages.create(**DEMO)).content[0].text


def test_count_of_tokens(told: Anthropic) -> None:
    """The count of a prompt with tools equals the usage of the message."""
    request = {"messages": TOLD["messages"], "tools": [WEATHER], "system": "Be brief."}
    count = told.messages.count_tokens(model="scripted", **request).input_tokens
    found = told.messages.create(**{**TOLD, **request})
    assert count == found.usage.input_tokens
    plain = told.messages.count_tokens(model="scripted", messages=TOLD["messages"])
    assert plain.input_tokens < count


def test_parsed_message(demo: Anthropic) -> None:
    """A parsed message has an object of the class."""
    found = demo.messages.parse(**{**DEMO, "max_tokens": 60}, output_format=Forecast)
    assert isinstance(found.parsed_output, Forecast)


def test_parsed_stream(demo: Anthropic) -> None:
    """The final message of a stream has an object of the class."""
    with demo.messages.stream(**{**DEMO, "max_tokens": 60}, output_format=Forecast) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Forecast)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_call(demo: Anthropic, choice: Any) -> None:
    """A forced call has an input of the schema."""
    choice = {**choice, "disable_parallel_tool_use": True}
    request = {**DEMO, "max_tokens": 60, "tools": [WEATHER], "tool_choice": choice}
    found = demo.messages.create(**request)
    (block,) = [one for one in found.content if one.type == "tool_use"]
    assert found.stop_reason == "tool_use"
    assert block.input["city"] in SCHEMA["properties"]["city"]["enum"]
    assert 1 <= block.input["days"] <= 9


def test_forced_call_of_the_scripted_models(told: Anthropic) -> None:
    """A forced call has the input that the message asks for."""
    choice = {"type": "tool", "name": "get_weather"}
    found = told.messages.create(**TOLD, tools=[WEATHER], tool_choice=choice)
    assert [(one.type, one.input) for one in found.content] == [("tool_use", ROME)]


def test_call_and_its_result(told: Anthropic) -> None:
    """The result of a call becomes part of the next prompt."""
    first = told.messages.create(**TOLD, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    (block,) = [one for one in first.content if one.type == "tool_use"]
    assert (block.name, block.input) == ("get_weather", ROME)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "It is sunny."}
    messages = [
        *TOLD["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = told.messages.create(**{**TOLD, "messages": messages}, tools=[WEATHER])
    assert second.content[0].text == "The tool says: It is sunny."


def test_streamed_call(told: Anthropic) -> None:
    """The input of a call grows with the events of the stream."""
    with told.messages.stream(**TOLD, tools=[WEATHER]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(snapshots) > 1
    (block,) = [one for one in final.content if one.type == "tool_use"]
    assert snapshots[-1] == block.input == ROME


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_runner(told: Anthropic, stream: bool) -> None:
    """The runner calls the function, and ends with what the model makes of its result."""
    runner = told.beta.messages.tool_runner(**TOLD, tools=[get_weather], stream=stream)
    assert runner.until_done().content[0].text == ANSWER


async def test_asynchronous_tool_runner(scripted: str) -> None:
    """The asynchronous runner yields each message, and ends with the answer."""

    @beta_async_tool
    async def get_weather(city: str, days: int) -> str:
        """Return the weather of a city."""
        return f"{city} is sunny for {days} days."

    async with AsyncAnthropic(base_url=root(scripted), **OPTIONS) as client:
        runner = client.beta.messages.tool_runner(**TOLD, tools=[get_weather])
        found = [message async for message in runner]
    assert [message.stop_reason for message in found] == ["tool_use", "end_turn"]
    assert found[-1].content[0].text == ANSWER


def test_prefilled_answer(told: Anthropic) -> None:
    """The message continues an answer that the request begins."""
    prefilled = {"role": "assistant", "content": "I say:"}
    messages = [{"role": "user", "content": "Answer yes"}, prefilled]
    found = told.messages.create(**{**TOLD, "messages": messages})
    assert found.content[0].text == "yes"


def test_batches_are_refused(demo: Anthropic) -> None:
    """The client raises an error in Anthropic's form, because there are no batches."""
    request = {"custom_id": "one", "params": DEMO}
    for refused in (
        lambda: demo.messages.batches.create(requests=[request]),
        lambda: list(demo.messages.batches.list()),
        lambda: demo.messages.batches.retrieve("msgbatch_1"),
    ):
        with pytest.raises(anthropic.NotFoundError) as caught:
            refused()
        assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_errors_have_the_clients_types(demo: Anthropic, stream: bool) -> None:
    """Errors have Anthropic's form and the id of the request, also before a stream begins."""
    with pytest.raises(anthropic.BadRequestError, match="top_p") as bad:
        demo.messages.create(**{**DEMO, "extra_body": {"top_p": 2}}, stream=stream)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.request_id == bad.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        demo.messages.create(**{**DEMO, "model": "unknown"}, stream=stream)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="8192"):
        demo.messages.create(**{**DEMO, "max_tokens": 10_000}, stream=stream)
