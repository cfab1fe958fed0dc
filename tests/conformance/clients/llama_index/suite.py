"""LlamaIndex with `OpenAILike`, as a chat model and as a model of completions."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from common import CALL
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict

CHAT = [ChatMessage(role="user", content="Write a function that adds two numbers.")]


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny for {days} days."


def opened(url: str, model: str, **options: bool) -> OpenAILike:
    """Return a model without retries of failed requests."""
    flags = {"is_chat_model": True, "is_function_calling_model": True, **options}
    return OpenAILike(
        model=model, api_base=url, api_key="none", max_retries=0, max_tokens=60, temperature=0,
        context_window=8192, **flags,
    )  # fmt: skip


@pytest.fixture
def demo(shipped: str) -> OpenAILike:
    """The shipped model."""
    return opened(shipped, "draftgate-demo")


@pytest.fixture
def told(scripted: str) -> OpenAILike:
    """The scripted model."""
    return opened(scripted, "scripted")


def test_chat_has_text_and_usage(demo: OpenAILike) -> None:
    """A chat has text, and its usage is in the raw response."""
    found = demo.chat(CHAT)
    assert found.message.content
    assert found.raw.usage.completion_tokens <= 60


def test_stream_equals_the_chat(demo: OpenAILike) -> None:
    """The deltas of a stream add up to the chat."""
    chunks = list(demo.stream_chat(CHAT))
    whole = demo.chat(CHAT).message.content
    assert "".join(chunk.delta for chunk in chunks) == whole
    assert chunks[-1].message.content == whole


async def test_asynchronous_chat_and_stream(demo: OpenAILike) -> None:
    """The asynchronous methods have the same text."""
    whole = (await demo.achat(CHAT)).message.content
    stream = await demo.astream_chat(CHAT)
    assert "".join([chunk.delta async for chunk in stream]) == whole


def test_log_probabilities(shipped: str) -> None:
    """Log probabilities of chats are available."""
    model = OpenAILike(
        model="draftgate-demo", api_base=shipped, api_key="none", is_chat_model=True,
        max_tokens=4, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    found = model.chat(CHAT).logprobs
    assert len(found) == 4
    assert all(math.isfinite(one.logprob) for tokens in found for one in tokens)


def test_completion_and_its_stream(shipped: str) -> None:
    """A model of completions continues a text, and its stream has the same text."""
    model = opened(shipped, "draftgate-demo", is_chat_model=False, is_function_calling_model=False)
    whole = model.complete("def add(a, b):")
    assert whole.text
    assert list(model.stream_complete("def add(a, b):"))[-1].text == whole.text


def test_shipped_model_answers_in_the_form(demo: OpenAILike) -> None:
    """The server enforces the schema of a forced function."""
    assert isinstance(demo.as_structured_llm(Forecast).chat(CHAT).raw, Forecast)


def test_streamed_object_is_complete_at_the_end(told: OpenAILike) -> None:
    """A stream of an object, for which the client does not force a call, ends complete."""
    demand = [ChatMessage(role="user", content='Call Forecast {"city": "Rome", "days": 2}')]
    *_, last = told.as_structured_llm(Forecast).stream_chat(demand)
    assert last.raw.model_dump() == {"city": "Rome", "days": 2}


def test_function_is_called(told: OpenAILike) -> None:
    """`predict_and_call` runs the function that the model calls."""
    tool = FunctionTool.from_defaults(get_weather)
    found = told.predict_and_call([tool], CALL)
    assert str(found) == "Rome is sunny for 2 days."


async def test_agent_runs_a_function(told: OpenAILike) -> None:
    """The agent streams its requests, runs the function and returns the last text."""
    found = await FunctionAgent(tools=[get_weather], llm=told).run(CALL)
    assert str(found) == "The tool says: Rome is sunny for 2 days."
    assert [call.tool_name for call in found.tool_calls] == ["get_weather"]


def test_embeddings(shipped: str) -> None:
    """Texts and queries get embeddings."""
    model = OpenAILikeEmbedding(
        model_name="draftgate-demo", api_base=shipped, api_key="none", max_retries=0
    )
    assert len(model.get_text_embedding_batch(["a", "b"])) == 2
    assert math.hypot(*model.get_query_embedding("a")) == pytest.approx(1, abs=1e-3)


def test_error_names_the_parameter(shipped: str) -> None:
    """A value outside its range raises the error of OpenAI's client."""
    model = OpenAILike(
        model="draftgate-demo", api_base=shipped, api_key="none", is_chat_model=True,
        max_retries=0, additional_kwargs={"top_p": 2},
    )  # fmt: skip
    with pytest.raises(BadRequestError, match="top_p"):
        model.chat(CHAT)
