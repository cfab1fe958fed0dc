"""smolagents with its model for OpenAI's API, and its agents that write calls and code."""

from __future__ import annotations

from typing import Any

import pytest
from common import CALL
from openai import BadRequestError
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

OPTIONS: dict[str, Any] = {"api_key": "none", "client_kwargs": {"max_retries": 0}}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Write Python."}]}]
WEATHER = "Rome is sunny for 2 days."
CODE = "<code>\nfinal_answer(get_weather('Rome', 2))\n</code>"


@tool
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city.
        days: number of days.
    """
    return f"{city} is sunny for {days} days."


@pytest.fixture
def demo(shipped: str) -> OpenAIModel:
    """The shipped model."""
    return OpenAIModel("draftgate-demo", shipped, max_tokens=30, temperature=0, **OPTIONS)


@pytest.fixture
def told(scripted: str) -> OpenAIModel:
    """The scripted models."""
    return OpenAIModel("scripted", scripted, **OPTIONS)


def test_stream_equals_the_message(demo: OpenAIModel) -> None:
    """The deltas of a stream add up to the message, and have the same usage."""
    whole = demo.generate(MESSAGES)
    deltas = list(demo.generate_stream(MESSAGES))
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    (usage,) = [delta.token_usage for delta in deltas if delta.token_usage]
    assert usage == whole.token_usage
    assert usage.output_tokens == 30


def test_stop_sequences(demo: OpenAIModel) -> None:
    """The message ends before the first stop sequence."""
    text = demo.generate(MESSAGES).content
    stop = text[10:13]
    assert demo.generate(MESSAGES, stop_sequences=["never", stop]).content == text.split(stop)[0]


def test_response_format(demo: OpenAIModel) -> None:
    """The server enforces a schema."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    found = demo.generate(MESSAGES, response_format=wanted)
    assert found.content.replace(" ", "") in {'{"ok":true}', '{"ok":false}'}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_agent_that_writes_calls(told: OpenAIModel, stream: bool) -> None:
    """The agent forces calls: of the function, and then of `final_answer`."""
    agent = ToolCallingAgent(
        [get_weather], told, stream_outputs=stream, verbosity_level=LogLevel.OFF
    )
    found = agent.run(CALL, return_full_result=True)
    assert (found.state, found.output) == ("success", WEATHER)
    assert len(agent.memory.steps) == 3  # the task, and two calls
    assert found.token_usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_agent_that_writes_code(told: OpenAIModel, stream: bool) -> None:
    """The agent runs the code, whose end is a stop sequence."""
    agent = CodeAgent([get_weather], told, stream_outputs=stream, verbosity_level=LogLevel.OFF)
    found = agent.run(f"Answer {CODE}", return_full_result=True)
    assert (found.state, found.output) == ("success", WEATHER)


def test_agent_with_structured_output(told: OpenAIModel) -> None:
    """The agent asks for thoughts and code with a schema."""
    agent = CodeAgent(
        [get_weather], told, use_structured_outputs_internally=True, verbosity_level=LogLevel.OFF
    )
    answer = '{"thought": "easy", "code": "final_answer(get_weather(\'Rome\', 2))"}'
    found = agent.run(f"Answer {answer}", return_full_result=True)
    assert (found.state, found.output) == ("success", WEATHER)


def test_error_has_the_status_and_the_code(demo: OpenAIModel) -> None:
    """A prompt that is too long raises the client's error."""
    with pytest.raises(BadRequestError) as caught:
        demo.generate([{"role": "user", "content": "x " * 100_000}])
    assert caught.value.code == "context_length_exceeded"
