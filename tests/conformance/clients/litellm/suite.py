"""litellm as a library, with the providers `openai` and `hosted_vllm`."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import pytest
from common import CALL, MESSAGES, WEATHER
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise, the import downloads prices.

import litellm

PROVIDERS = ("openai", "hosted_vllm")


class Forecast(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def options(url: str, name: str = "openai/draftgate-demo") -> dict[str, Any]:
    """Return the arguments of a request without retries."""
    return {"model": name, "api_base": url, "api_key": "none", "num_retries": 0}


@pytest.fixture(params=PROVIDERS)
def demo(request: pytest.FixtureRequest, shipped: str) -> dict[str, Any]:
    """Arguments for the shipped model with each provider."""
    return options(shipped, f"{request.param}/draftgate-demo")


@pytest.fixture(params=PROVIDERS)
def told(request: pytest.FixtureRequest, scripted: str) -> dict[str, Any]:
    """Arguments for the scripted model with each provider."""
    return options(scripted, f"{request.param}/scripted")


def test_completion_has_text_and_usage(demo: dict[str, Any]) -> None:
    """A chat has the requested number of tokens."""
    found = litellm.completion(**demo, messages=MESSAGES, max_tokens=8, temperature=0)
    assert found.choices[0].message.content
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 8


def test_stream_equals_the_completion(demo: dict[str, Any]) -> None:
    """The chunks of a stream add up to the whole response, with its usage."""
    request = {**demo, "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = litellm.completion(**request)
    chunks = list(
        litellm.completion(**request, stream=True, stream_options={"include_usage": True})
    )
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_asynchronous_stream(demo: dict[str, Any]) -> None:
    """An asynchronous stream has text."""
    stream = await litellm.acompletion(**demo, messages=MESSAGES, max_tokens=8, seed=3, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_choices_log_probabilities_and_stop(demo: dict[str, Any]) -> None:
    """The response has all choices with log probabilities, none of which contains the stop text."""
    found = litellm.completion(
        **demo,
        messages=MESSAGES,
        max_tokens=16,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=["\n"],
        temperature=0,
    )
    assert len(found.choices) == 2
    assert all(choice.logprobs.content for choice in found.choices)
    assert all("\n" not in choice.message.content for choice in found.choices)


def test_forced_call(told: dict[str, Any]) -> None:
    """A forced call has the arguments that the model chooses within the schema."""
    found = litellm.completion(
        **told, messages=[{"role": "user", "content": CALL}], tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    (call,) = found.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_call_and_its_result(told: dict[str, Any], stream: bool) -> None:
    """The model calls a function, and its result becomes part of the next prompt."""
    messages: list[Any] = [{"role": "user", "content": CALL}]
    found = litellm.completion(**told, messages=messages, tools=[WEATHER], stream=stream)
    if stream:
        found = litellm.stream_chunk_builder(list(found), messages=messages)
    assert found.choices[0].finish_reason == "tool_calls"
    message = found.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    found = litellm.completion(**told, messages=messages, tools=[WEATHER])
    assert found.choices[0].message.content == "The tool says: It is sunny."


def test_response_format_of_a_class(demo: dict[str, Any]) -> None:
    """The content satisfies the class of `response_format`."""
    found = litellm.completion(**demo, messages=MESSAGES, response_format=Forecast, max_tokens=60)
    Forecast.model_validate_json(found.choices[0].message.content)


def test_text_completion(shipped: str) -> None:
    """A completion continues its prompt."""
    found = litellm.text_completion(
        **options(shipped, "text-completion-openai/draftgate-demo"),
        prompt="def add(a, b):", max_tokens=8, temperature=0,
    )  # fmt: skip
    assert found.choices[0].text
    assert found.usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses(shipped: str, stream: bool) -> None:
    """`litellm.responses` uses `/v1/responses`."""
    found = litellm.responses(
        **options(shipped), input="Hello", max_output_tokens=16, temperature=0, stream=stream
    )
    if stream:
        found = list(found)[-1].response
    assert found.status == "incomplete"
    assert found.output[0].content[0].text
    assert found.usage.output_tokens == 16


def test_embedding(shipped: str) -> None:
    """Each input gets an embedding."""
    found = litellm.embedding(**options(shipped), input=["a", "b"], encoding_format="float")
    assert len(found.data) == 2
    assert found.usage.prompt_tokens > 0


def test_errors_have_the_clients_types(shipped: str) -> None:
    """litellm recognises a prompt that is too long, a bad field and an unknown model."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            **options(shipped), messages=[{"role": "user", "content": "x " * 100_000}]
        )
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**options(shipped), messages=MESSAGES, top_p=2)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options(shipped, "openai/unknown"), messages=MESSAGES)
