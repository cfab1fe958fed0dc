"""openai-agents with its models of chats and of responses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
from common import CALL
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, ConfigDict

set_tracing_disabled(True)

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
LIMITED = ModelSettings(max_tokens=60, temperature=0)
ANSWER = "The tool says: Rome is sunny for 2 days."


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@function_tool
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny for {days} days."


def model_of(kind: str, name: str, url: str) -> Model:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return KINDS[kind](name, client)


@pytest.fixture(params=KINDS)
def demo(request: pytest.FixtureRequest, shipped: str) -> Model:
    """The shipped model through each API."""
    return model_of(request.param, "draftgate-demo", shipped)


@pytest.fixture(params=KINDS)
def told(request: pytest.FixtureRequest, scripted: str) -> Model:
    """The scripted models through each API."""
    return model_of(request.param, "scripted", scripted)


def agent(model: Model, **options: Any) -> Agent[None]:
    return Agent(name="assistant", model=model, **options)


async def test_agent_returns_text_and_usage(told: Model) -> None:
    """A run without functions returns the text of the model."""
    found = await Runner.run(agent(told, instructions="Be brief."), "Answer forty-two")
    assert found.final_output == "forty-two"
    assert found.context_wrapper.usage.output_tokens > 1
    assert found.context_wrapper.usage.input_tokens > 0


async def test_output_that_is_cut(shipped: str) -> None:
    """A chat that ends with `max_tokens` returns its text, and a response raises an error."""
    options = {"instructions": "Write Python.", "model_settings": LIMITED}
    chat = agent(model_of("chat", "draftgate-demo", shipped), **options)
    assert (await Runner.run(chat, "Add.")).final_output
    response = agent(model_of("responses", "draftgate-demo", shipped), **options)
    with pytest.raises(ModelBehaviorError, match="max_output_tokens"):
        await Runner.run(response, "Add.")


async def test_output_has_the_type(demo: Model) -> None:
    """The server enforces the schema of the output."""
    found = await Runner.run(agent(demo, output_type=Forecast, model_settings=LIMITED), "Forecast?")
    assert isinstance(found.final_output, Forecast)


async def test_agent_runs_a_function(told: Model) -> None:
    """The agent calls the function and returns what the model makes of the result."""
    found = await Runner.run(agent(told, tools=[get_weather]), CALL)
    assert found.final_output == ANSWER
    assert found.context_wrapper.usage.requests == 2


async def test_streamed_agent_runs_a_function(told: Model) -> None:
    """A streamed run has the events of a call and of its result, and the same output."""
    run = Runner.run_streamed(agent(told, tools=[get_weather]), CALL)
    pieces, items = [], []
    async for event in run.stream_events():
        if event.type == "run_item_stream_event":
            items.append(event.item.type)
        elif getattr(event, "data", None) and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    assert items == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(pieces) > 1
    assert "".join(pieces) == run.final_output == ANSWER


@pytest.mark.parametrize("choice", ["required", "get_weather"])
async def test_forced_call(told: Model, choice: str) -> None:
    """The agent forces a call, and the next turn is free to answer."""
    settings = ModelSettings(tool_choice=choice)
    found = await Runner.run(agent(told, tools=[get_weather], model_settings=settings), CALL)
    assert found.final_output == ANSWER


async def test_handoff(told: Model) -> None:
    """A call hands the conversation to another agent."""
    poet = Agent(name="poet", model=told)
    found = await Runner.run(agent(told, handoffs=[poet]), "Call transfer_to_poet {}")
    assert found.last_agent is poet
    assert found.final_output.startswith("The tool says: ")


async def test_agent_as_a_tool(told: Model) -> None:
    """An agent is a function of another agent."""
    inner = agent(told).as_tool("ask", "Answers a question.")
    found = await Runner.run(agent(told, tools=[inner]), 'Call ask {"input": "Answer forty-two"}')
    assert found.final_output == "The tool says: forty-two"


async def test_session_continues(told: Model) -> None:
    """A session sends the earlier messages with the next one."""
    session = SQLiteSession("one")
    one = agent(told, tools=[get_weather])
    first = await Runner.run(one, CALL, session=session)
    second = await Runner.run(one, "Answer fine", session=session)
    assert second.final_output == "fine"
    usage = [run.raw_responses[0].usage.input_tokens for run in (first, second)]
    assert usage[1] > usage[0]


async def test_response_is_continued_by_its_id(scripted: str) -> None:
    """The server has the conversation, so that the second request has only the new message."""
    model = model_of("responses", "scripted", scripted)
    first = await Runner.run(agent(model), "Answer one")
    second = await Runner.run(
        agent(model), "Answer two", previous_response_id=first.last_response_id
    )
    assert second.final_output == "two"
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens


async def test_calls_are_limited(told: Model) -> None:
    """A run ends with an error after the allowed number of turns."""
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(agent(told, tools=[get_weather]), CALL, max_turns=1)


async def test_error_has_the_status_and_the_code(demo: Model) -> None:
    """A prompt that is too long raises the client's error with its code."""
    with pytest.raises(BadRequestError) as caught:
        await Runner.run(agent(demo), "x " * 100_000)
    assert caught.value.code == "context_length_exceeded"
