"""pydantic-ai with its models of chats, of responses and of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from common import CALL
from pydantic import BaseModel, ConfigDict
from pydantic_ai import (
    Agent,
    Embedder,
    ModelHTTPError,
    ModelRetry,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
)
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
LIMITED = ModelSettings(max_tokens=60, temperature=0)


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=url, api_key="none")


def model_of(kind: str, name: str, url: str) -> Model:
    """Return a model through an API. Anthropic's client adds `/v1` to the URL."""
    if kind == "messages":
        anthropic = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
        profile = ModelProfile(supports_json_schema_output=True)  # unknown for other models
        settings = ModelSettings(max_tokens=300)  # the default exceeds the context
        return AnthropicModel(name, provider=anthropic, profile=profile, settings=settings)
    return KINDS[kind](name, provider=provider(url))


@pytest.fixture(params=KINDS)
def demo(request: pytest.FixtureRequest, shipped: str) -> Model:
    """The shipped model through each API."""
    return model_of(request.param, "draftgate-demo", shipped)


@pytest.fixture(params=KINDS)
def told(request: pytest.FixtureRequest, scripted: str) -> Model:
    """The scripted models through each API."""
    return model_of(request.param, "scripted", scripted)


def agent_with_weather(model: Model, **options: Any) -> Agent:
    """Return an agent with a function that a call of `get_weather` runs."""
    agent = Agent(model, **options)

    @agent.tool_plain
    def get_weather(city: str, days: int) -> str:
        """Return the weather of a city."""
        return f"{city} is sunny for {days} days."

    return agent


def test_agent_returns_text_and_usage(demo: Model) -> None:
    """A run without functions returns the text of the model."""
    found = Agent(demo, instructions="Write Python.").run_sync("Add.", model_settings=LIMITED)
    assert found.output
    assert found.usage.output_tokens <= 60
    assert found.usage.input_tokens > 0


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_shipped_model_answers_in_the_form(demo: Model, form: type) -> None:
    """The server enforces the schema of the output."""
    agent = Agent(demo, output_type=form(Forecast), retries=0)
    assert isinstance(agent.run_sync("Forecast?", model_settings=LIMITED).output, Forecast)


def test_form_of_the_prompt(told: Model) -> None:
    """The mode asks for the form in the prompt."""
    agent = Agent(told, output_type=PromptedOutput(Forecast), retries=0)
    assert agent.run_sync('Answer {"city": "Rome", "days": 2}').output.city == "Rome"


def test_agent_runs_a_function(told: Model) -> None:
    """The agent calls the function and returns what the model makes of the result."""
    found = agent_with_weather(told).run_sync(CALL)
    assert found.output == "The tool says: Rome is sunny for 2 days."
    assert found.usage.requests == 2
    assert found.usage.tool_calls == 1


async def test_streamed_agent_runs_a_function(told: Model) -> None:
    """A streamed run has the same output."""
    async with agent_with_weather(told).run_stream(CALL) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "".join(pieces) == "The tool says: Rome is sunny for 2 days."


async def test_streamed_object(demo: Model) -> None:
    """A stream of an object ends with the complete object."""
    agent = Agent(demo, output_type=NativeOutput(Forecast), retries=0)
    async with agent.run_stream("Forecast?", model_settings=LIMITED) as run:
        assert isinstance(await run.get_output(), Forecast)


def test_function_that_asks_for_a_retry(told: Model) -> None:
    """The error of a function becomes part of the conversation."""
    agent = Agent(told)

    @agent.tool_plain
    def get_weather(city: str, days: int) -> str:
        raise ModelRetry(f"No weather in {city}.")

    assert "No weather in Rome." in agent.run_sync(CALL).output


def test_history_continues(told: Model) -> None:
    """A second run continues a conversation with calls."""
    agent = agent_with_weather(told)
    first = agent.run_sync(CALL)
    second = agent.run_sync("Answer fine", message_history=first.all_messages())
    assert second.output == "fine"
    assert second.usage.input_tokens > first.usage.input_tokens / 2


def test_response_is_continued_by_its_id(scripted: str) -> None:
    """The server has the conversation, so the second request has only the new message."""
    model = OpenAIResponsesModel("scripted", provider=provider(scripted))
    agent = Agent(model, model_settings={"openai_previous_response_id": "auto"})
    first = agent.run_sync("Answer one")
    second = agent.run_sync("Answer two", message_history=first.all_messages())
    assert second.output == "two"
    assert second.usage.input_tokens > first.usage.input_tokens


def test_embeddings(shipped: str) -> None:
    """Each text gets an embedding."""
    embedder = Embedder(OpenAIEmbeddingModel("draftgate-demo", provider=provider(shipped)))
    found = embedder.embed_documents_sync(["a", "b"])
    assert len(found.embeddings) == 2


def test_error_has_the_status_and_the_body(demo: Model) -> None:
    """A prompt that is too long raises an error with status 400 and its code."""
    with pytest.raises(ModelHTTPError) as caught:
        Agent(demo).run_sync("x " * 100_000)
    assert caught.value.status_code == 400
    body = caught.value.body
    if "code" in body:  # Anthropic's errors have none
        assert body["code"] == "context_length_exceeded"
    else:
        assert body["error"]["type"] == "invalid_request_error"
