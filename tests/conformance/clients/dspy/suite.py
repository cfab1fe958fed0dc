"""DSPy with its adapters and its two clients: its own one, `lm15`, and LiteLLM.

DSPy uses schemas and functions only with models whose features it knows. The suite therefore
declares the server as a provider. LiteLLM has no such declaration.
"""

from __future__ import annotations

from typing import Any, Literal

import dspy
import pytest
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)

OPTIONS: dict[str, Any] = {"api_key": "none", "cache": False, "num_retries": 0}
CALL = 'Call get_weather {"city": "Rome", "days": 2}'


register_provider(
    ProviderDefinition.chat(
        AccessPolicy("draftgate", base_url="http://127.0.0.1:8000/v1"),
        compat=OpenAIChatCompat.preset("vllm"), placeholder_key="none",
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)  # fmt: skip


class Forecast(dspy.Signature):
    """Forecast the weather."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()
    days: Literal[1, 2] = dspy.OutputField()


def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny for {days} days."


@pytest.fixture
def demo(shipped: str) -> dspy.LM:
    """The shipped model as a declared provider."""
    return dspy.LM("draftgate/draftgate-demo", api_base=shipped, engine="lm15", temperature=0,
                   max_tokens=60, **OPTIONS)  # fmt: skip


@pytest.fixture
def declared(scripted: str) -> dspy.LM:
    """The scripted models as a declared provider."""
    return dspy.LM("draftgate/scripted", api_base=scripted, engine="lm15", max_tokens=300,
                   **OPTIONS)  # fmt: skip


@pytest.fixture(params=["chat", "responses"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each API."""
    return request.param


@pytest.fixture(params=["lm15", "litellm"])
def told(request: pytest.FixtureRequest, kind: str, scripted: str) -> dspy.LM:
    """The scripted models through each API, with each client, as OpenAI's models."""
    return dspy.LM("openai/scripted", api_base=scripted, model_type=kind, engine=request.param,
                   max_tokens=300, **OPTIONS)  # fmt: skip


def test_call_of_the_model(told: dspy.LM, kind: str) -> None:
    """A call returns a list of texts, and its usage becomes part of the history."""
    assert told("Answer yes") == (["yes"] if kind == "chat" else [{"text": "yes"}])
    assert told.history[-1]["usage"]["total_tokens"] > 0


async def test_asynchronous_call_of_the_model(told: dspy.LM) -> None:
    """An asynchronous call returns the same."""
    assert await told.acall("Answer yes") == told("Answer yes")


def test_completions(shipped: str) -> None:
    """A model of texts uses `/v1/completions`."""
    model = dspy.LM("text-completion-openai/draftgate-demo", api_base=shipped, model_type="text",
                    temperature=0, max_tokens=8, **OPTIONS)  # fmt: skip
    (text,) = model("def add(a, b):")
    assert text


def test_fields_in_the_text(told: dspy.LM) -> None:
    """The adapter for chats finds the fields in the text of the model."""
    with dspy.context(lm=told, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        found = dspy.Predict("question -> reply")(question="forty-two")
    assert found.reply == "forty-two"


def test_fields_of_a_schema(demo: dspy.LM) -> None:
    """The adapter for JSON asks for a schema, which the server enforces."""
    with dspy.context(lm=demo, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Forecast)(question="Rome?")
    assert found.city in {"Paris", "Rome"}
    assert found.days in {1, 2}


def test_call_of_a_function(declared: dspy.LM) -> None:
    """The adapter passes functions in the request, and returns the calls of the response."""
    signature = dspy.Signature("question, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=declared, adapter=adapter):
        found = dspy.Predict(signature)(question=CALL, tools=[dspy.Tool(get_weather)])
    (call,) = found.calls.tool_calls
    assert (call.name, call.args) == ("get_weather", {"city": "Rome", "days": 2})


async def test_streamed_field(declared: dspy.LM) -> None:
    """The pieces of a field add up to its text."""
    program = dspy.streamify(
        dspy.Predict("question -> reply"),
        stream_listeners=[dspy.streaming.StreamListener(signature_field_name="reply")],
    )
    with dspy.context(lm=declared, adapter=dspy.ChatAdapter()):
        pieces = [piece async for piece in program(question="one two three four")]
    *chunks, last = pieces
    assert len(chunks) > 1
    assert "".join(chunk.chunk for chunk in chunks) == last.reply == "one two three four"


def test_error(demo: dspy.LM) -> None:
    """A prompt that is too long raises the error that DSPy has for it."""
    with pytest.raises(dspy.ContextWindowExceededError):
        demo("x " * 100_000)


def test_embeddings(shipped: str) -> None:
    """Each text gets an embedding."""
    embedder = dspy.Embedder("openai/draftgate-demo", api_base=shipped, api_key="none",
                             caching=False)  # fmt: skip
    assert embedder(["a", "b"]).shape[0] == 2
